"""Which token ends a choice, and with what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.intake import Limits, sequences_of
from headrace.engine.stopping import finish_after_last, finish_of, max_len_of, stop_ids_of
from headrace.engine.types import Finish, Request, SamplingOptions

EOS = frozenset({98, 99})


def end_of(tokens: list[int], prompt_len: int = 3, max_model_len: int = 100, **options: object) -> Finish | None:
    wanted = SamplingOptions(**options)  # type: ignore[arg-type]
    return finish_of(tokens, wanted, stop_ids_of(wanted, EOS), max_model_len, prompt_len)


def test_every_eos_and_the_requests_own_ids_stop() -> None:
    assert stop_ids_of(SamplingOptions(), EOS) == {98, 99}
    assert stop_ids_of(SamplingOptions(stop_token_ids=(5, 98)), EOS) == {5, 98, 99}
    assert stop_ids_of(SamplingOptions(stop_token_ids=(5, 98), ignore_eos=True), EOS) == {5, 98}


@pytest.mark.parametrize(
    ("tokens", "options", "wanted"),
    [
        ([], {}, None),
        ([1, 2], {}, None),
        ([1, 99], {}, Finish("stop", stop=99)),
        ([1, 5], {"stop_token_ids": (5,)}, Finish("stop", stop=5)),
        ([1, 99], {"ignore_eos": True}, None),
        ([1, 2, 3], {"max_tokens": 3}, Finish("length")),
        ([1, 2, 99], {"max_tokens": 3}, Finish("stop", stop=99)),  # both: stop
        ([99], {"min_tokens": 1}, None),  # no token stands before it
        ([1, 99], {"min_tokens": 1}, Finish("stop", stop=99)),
        ([1, 99], {"min_tokens": 2}, None),
        ([1, 99, 3], {"min_tokens": 2}, None),
        ([1, 2, 99], {"min_tokens": 2}, Finish("stop", stop=99)),
        ([1, 99, 3], {"max_tokens": 3, "min_tokens": 5}, Finish("length")),
    ],
)
def test_what_ends_a_choice(tokens: list[int], options: dict[str, object], wanted: Finish | None) -> None:
    assert end_of(tokens, **options) == wanted


@pytest.mark.parametrize(("count", "ended"), [(6, False), (7, True), (8, True)])
def test_the_models_length_ends_a_choice_too(count: int, ended: bool) -> None:
    assert max_len_of(SamplingOptions(), 3, 10) == 10
    assert end_of([1] * count, max_model_len=10) == (Finish("length") if ended else None)


@given(
    tokens=st.lists(st.sampled_from([1, 2, 98, 99]), min_size=1, max_size=12),
    options=st.builds(
        SamplingOptions, max_tokens=st.integers(1, 12), min_tokens=st.integers(0, 12), ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (2,)]),
    ),
    max_model_len=st.integers(5, 16),
)  # fmt: skip
def test_sampled_and_settled_tokens_end_a_choice_alike(
    tokens: list[int], options: SamplingOptions, max_model_len: int
) -> None:
    """What an earlier attempt published ends a choice exactly where sampling it would have."""
    limits = Limits(100, EOS, max_model_len, 100, 16)
    (sequence,) = sequences_of(Request("a", (1, 1, 1), options), limits, 0)
    for count, token_id in enumerate(tokens, start=1):
        sequence.token_ids.append(token_id)
        finish = finish_after_last(sequence)
        assert finish == finish_of(tokens[:count], options, sequence.stop_ids, max_model_len, 3)
        if finish is not None:
            break
