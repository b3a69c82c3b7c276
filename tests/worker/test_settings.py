"""Flags and variables: what they read, and what they refuse in which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.clients.address import FORMS, parse_address
from headrace.engine.types import EngineConfig
from headrace.worker.command import known_variables
from headrace.worker.exit_codes import UsageError
from headrace.worker.flags import flags_of, load_settings, refuse_misspelt_variables
from headrace.worker.options import WorkerSettings
from headrace.worker.settings import SERVING_FLAGS, DemoFlags, WorkerFlags
from headrace.worker.settings_client import CLIENT_FLAGS, SubmitFlags, TailFlags
from headrace.worker.settings_server import ServerFlags
from headrace.worker.units import format_duration, format_size, parse_duration_s, parse_size_bytes

URLS = FORMS
SHARE = "a number above 0 and at most 1"
ALL_FLAGS = (*SERVING_FLAGS, *CLIENT_FLAGS)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own variables are no part of these tests."""
    for name in known_variables():
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("250ms", 0.25),
        ("1h", 3600),
        ("1d", 86400),
        ("1m30s", 90),
        ("1.5s", 1.5),
        ("12", 12),
        ("0", 0),
        (" 3s ", 3),
        (4.5, 4.5),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "3x", "-1s", "1 m", "1s1", "١s", "1e3s", "inf", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration_s(text)


@pytest.mark.parametrize("seconds", [0.25, 1, 1.5, 30, 90, 300, 3600, 7200, 86400, 0])
def test_a_duration_is_read_back(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8MiB", 8 << 20), ("64KB", 64000), ("1.5 GiB", 3 << 29), ("12", 12), ("7b", 7), (9, 9)]
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1KB", "8 Mi", "8TBB", "²"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size_bytes(text)


def test_sizes_are_read_back() -> None:
    for num_bytes in (1, 1000, 1024, 8 << 20, 3 << 29):
        assert parse_size_bytes(format_size(num_bytes)) == num_bytes


def test_the_defaults_are_those_of_engine_and_worker() -> None:
    flags = load_settings(WorkerFlags, {"model": "m"})
    assert flags.engine_config() == EngineConfig()
    assert flags.worker_settings("redis://h") == WorkerSettings(url="redis://h")


def test_every_flag_takes_effect() -> None:
    given = {
        "device": "cpu", "dtype": "float32", "max_num_seqs": "3", "max_num_batched_tokens": "65", "max_model_len": "99",
        "gpu_memory_utilization": "0.5", "kv_cache_dtype": "fp8", "num_kv_blocks": "77", "block_size": "32",
        "enable_prefix_caching": False,
    }  # fmt: skip
    assert load_settings(WorkerFlags, {"model": "m", **given}).engine_config() == EngineConfig(
        device="cpu",
        dtype="float32",
        max_num_seqs=3,
        max_num_batched_tokens=65,
        max_model_len=99,
        gpu_memory_utilization=0.5,
        kv_cache_dtype="fp8_e4m3",
        num_kv_blocks=77,
        block_size=32,
        enable_prefix_caching=False,
    )
    given = {
        "queue": "q", "prefix": "p", "lease": "3s", "watchdog": "4s", "drain_timeout": "5s", "max_attempts": "6",
        "queue_ttl": "2h", "result_ttl": "7s", "max_payload": "8KiB", "burst": True,
    }  # fmt: skip
    assert load_settings(WorkerFlags, {"model": "m", **given}).worker_settings("redis://h") == WorkerSettings(
        url="redis://h",
        prefix="p",
        queue="q",
        lease_s=3,
        watchdog_s=4,
        drain_timeout_s=5,
        max_attempts=6,
        queue_ttl_s=7200,
        result_ttl_s=7,
        max_payload_bytes=8192,
        burst=True,
    )


def test_a_variable_is_read_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODEL", "from-variable")
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("HEADRACE_LEASE", "2m")
    monkeypatch.setenv("HEADRACE_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("HEADRACE_DTYPE", "")  # as `${DTYPE:-}` in a compose file: not set
    flags = load_settings(WorkerFlags, {"max_num_seqs": "9", "model": None})
    assert (flags.model, flags.max_num_seqs, flags.lease, flags.dtype) == ("from-variable", 9, 120, "auto")
    assert not flags.enable_prefix_caching
    assert load_settings(WorkerFlags, {"enable_prefix_caching": True}).enable_prefix_caching


def test_every_flag_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"N": "4", "X": "0.5", "DURATION": "3s", "SIZE": "3KB", "URL": "redis://h", "NAME": "a", "ID": "1-1"}
    for kind in ALL_FLAGS:
        for flag in flags_of(kind):
            with monkeypatch.context() as patch:
                default = kind.model_fields[flag.field].default
                value = str(not default) if flag.is_bool else values.get(flag.metavar, flag.metavar.split("|")[-1])
                patch.setenv(flag.variable, "3h" if flag.field == "queue_ttl" else value)
                if flag.field in ("port", "server"):
                    patch.setenv("HEADRACE_EMBEDDED", "1")
                loaded = load_settings(kind, {"model": "m"} if kind is WorkerFlags and flag.field != "model" else {})
                assert getattr(loaded, flag.field) != default, flag.variable


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {},
            "--model (or HEADRACE_MODEL) is missing: "
            "a folder, an id of the Hugging Face hub, or `demo`, the one shipped",
        ),
        ({"lease": "abc"}, "--lease is 'abc': must be a duration such as 30s, 5m or 250ms, at least 1s"),
        ({"lease": "999ms"}, "--lease is '999ms': must be a duration such as 30s, 5m or 250ms, at least 1s"),
        ({"device": "tpu"}, "--device is 'tpu': must be auto, cpu or cuda"),
        (
            {"kv_cache_dtype": "int4"},
            "--kv-cache-dtype is 'int4': must be auto, fp32, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2 or int8",
        ),
        ({"max_num_seqs": "0"}, "--max-num-seqs is '0': must be an integer from 1"),
        ({"max_num_seqs": "1.5"}, "--max-num-seqs is '1.5': must be an integer from 1"),
        ({"gpu_memory_utilization": "1.1"}, f"--gpu-memory-utilization is \'1.1\': must be {SHARE}"),
        ({"gpu_memory_utilization": "nan"}, f"--gpu-memory-utilization is \'nan\': must be {SHARE}"),
        ({"queue": "a b"}, "--queue is 'a b': must be 1 to 64 characters of A–Z a–z 0–9 _ . -"),
        ({"queue": "a\n"}, "--queue is 'a\\n': must be 1 to 64 characters of A–Z a–z 0–9 _ . -"),
        ({"queue_ttl": "1h"}, "--queue-ttl is '1h': must be a duration such as 30s, 5m or 250ms, above 1h"),
        ({"port": "65536"}, "--port is '65536': must be an integer from 1 to 65535"),
        ({"port": "6390"}, "--port and --server (HEADRACE_PORT, HEADRACE_SERVER) need --embedded"),
        ({"redis_url": "http://u:secret@h"}, f"--redis-url is \'http://u:***@h\': must be {URLS}"),
        ({"redis_url": "redis://h:x"}, f"--redis-url is \'redis://h:x\': must be {URLS}"),
        ({"redis_url": "redis://h/x"}, f"--redis-url is \'redis://h/x\': must be {URLS}"),
        (
            {"redis_url": "redis://h", "embedded": True},
            "--embedded (HEADRACE_EMBEDDED) and --redis-url (HEADRACE_REDIS_URL) exclude each other: "
            "the embedded server has an address of its own",
        ),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_that_names_the_flag_and_what_is_allowed(given: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(WorkerFlags, {"model": "m", **given} if given else {})
    assert str(caught.value) == line


def test_a_refused_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DRAIN_TIMEOUT", "soon")
    with pytest.raises(UsageError) as caught:
        load_settings(WorkerFlags, {"model": "m"})
    assert str(caught.value) == (
        "HEADRACE_DRAIN_TIMEOUT (flag --drain-timeout) is 'soon': must be a duration such as 30s, 5m or 250ms"
    )


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_SERVICE_HOST", "HEADRACE_PORT_80_TCP", "HEADRACE_CACHE_DIR", "OTHER_MAX_NUM_SEQ"):
        monkeypatch.setenv(name, "1")
    refuse_misspelt_variables(known_variables())
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "1")
    with pytest.raises(UsageError, match=r"HEADRACE_MAX_NUM_SEQ is no variable .* did you mean HEADRACE_MAX_NUM_SEQS"):
        refuse_misspelt_variables(known_variables())


def test_every_variable_that_the_code_reads_is_known() -> None:
    root = Path(__file__).resolve().parents[2]
    for folder in ("kernels", "engine", "clients"):
        for file in (root / folder).rglob("*.py"):
            assert set(re.findall(r"HEADRACE_[A-Z_]+", file.read_text())) <= known_variables(), file


def test_what_kubernetes_sets_beside_a_service_is_not_meant_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "tcp://10.0.0.1:80")
    assert load_settings(WorkerFlags, {"model": "m"}).port is None


def test_a_text_that_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_STOP", "a, b")
    assert load_settings(SubmitFlags, {}).stop == ("a, b",)
    assert load_settings(SubmitFlags, {"stop": ["x", "y"]}).stop == ("x", "y")


def test_a_password_comes_from_a_file_and_is_shown_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss/word:1\n")
    flags = load_settings(ServerFlags, {"redis_url": "redis://me@h:1/2", "redis_password_file": str(file)})
    assert flags.url() == f"redis://me@h:1/2?password_file={file}"
    assert parse_address(flags.url()).options["credential_provider"].get_credentials() == ("me", "p@ss/word:1")
    both = load_settings(ServerFlags, {"redis_url": "redis://:secret@h", "redis_password_file": str(file)})
    with pytest.raises(UsageError, match="has both a password and a --redis-password-file") as caught:
        both.url()
    assert "secret" not in str(caught.value) + repr(both)
    missing = load_settings(ServerFlags, {"redis_password_file": str(tmp_path / "none")})
    with pytest.raises(UsageError, match="No such file"):
        missing.url()


def test_the_demo_and_the_tail_have_their_defaults() -> None:
    assert load_settings(DemoFlags, {}).model == "demo"
    assert load_settings(TailFlags, {}).timeout == 30
