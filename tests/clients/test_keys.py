import pytest

from headrace.clients import ConfigError, Keys
from headrace.clients.keys import is_valid_id


def test_the_keys_are_those_of_the_protocol() -> None:
    keys = Keys("p", "q")
    assert keys.all_jobs == ("p:{q}:jobs:high", "p:{q}:jobs", "p:{q}:jobs:low")
    assert keys.jobs() == "p:{q}:jobs"
    assert keys.dead == "p:{q}:dead"
    assert keys.worker("host-1:2") == "p:{q}:worker:host-1:2"
    assert keys.out("a:b.c") == "p:req:{a:b.c}:out"
    assert keys.cancel("a:b.c") == "p:req:{a:b.c}:cancel"
    assert Keys() == Keys("headrace", "default")


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a:b", "a{b", "é", "a\n", "*"])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keys(name)
    assert caught.value.param == "prefix"
    with pytest.raises(ConfigError) as caught:
        Keys("p", name)
    assert caught.value.param == "queue"


@pytest.mark.parametrize("name", ["a", "A-Z_0.9", "x" * 64])
def test_names_of_all_allowed_characters(name: str) -> None:
    assert name in Keys(name, name).dead


@pytest.mark.parametrize(("request_id", "valid"), [("a", True), ("A:b_c.d-9" + "x" * 119, True), ("x" * 129, False)])
def test_lengths_of_ids(request_id: str, valid: bool) -> None:
    assert is_valid_id(request_id) is valid


@pytest.mark.parametrize("request_id", ["", "a b", "a}b", "a\n", "ä", "a/b"])
def test_an_id_that_cannot_be_is_refused_wherever_a_key_is_made(request_id: str) -> None:
    for make in (Keys().out, Keys().cancel, Keys().worker):
        with pytest.raises(ConfigError):
            make(request_id)
