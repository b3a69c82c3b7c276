"""The batch changes at every step: who comes later and wants less leaves first."""

from __future__ import annotations

from pathlib import Path

from headrace.clients import Client
from headrace.clients.keys import Keys
from headrace.engine import EngineConfig, Request, SamplingOptions, load_engine
from tests.support.demo_worker import DEMO_MODEL, demo_worker
from tests.support.server import Server

LONG = SamplingOptions(max_tokens=60, temperature=0, ignore_eos=True)
SHORT = SamplingOptions(max_tokens=5, temperature=0, ignore_eos=True)


def test_a_short_request_joins_a_step_after_it_is_added_and_leaves_in_the_step_of_its_last_token() -> None:
    engine, tokenizer, _ = load_engine(str(DEMO_MODEL), EngineConfig(max_num_seqs=4, num_kv_blocks=64))
    prompt = tuple(tokenizer.encode("Once upon a time"))
    for name in ("long-0", "long-1", "long-2"):
        engine.add(Request(name, prompt, LONG))
    steps: dict[int, set[str]] = {}
    added_after = ended_in = 0
    while engine.has_work:
        output = engine.step()
        steps[output.step] = {request_id for request_id, _, _ in output.scheduled}
        if any(o.request_id == "short" and o.finish for o in output.outputs):
            ended_in = output.step
        if len(steps) == 10:
            added_after = output.step
            engine.add(Request("short", prompt, SHORT))
    long = {"long-0", "long-1", "long-2"}
    with_short = [step for step, names in steps.items() if "short" in names]
    assert with_short == list(range(added_after + 1, added_after + 1 + 5)), (
        "one step a token, from the very next one on"
    )
    assert ended_in == with_short[-1]
    assert all(steps[step] == long | {"short"} for step in with_short), "beside the long ones, which do not pause"
    assert steps[ended_in + 1] == long
    assert max(steps) > ended_in + 10


def test_a_short_request_behind_long_ones_is_answered_before_they_are(server: Server, tmp_path: Path) -> None:
    with (
        demo_worker(server, tmp_path, {"--max-num-seqs": 4}) as worker,
        Client(server.url, queue=worker.queue) as client,
    ):
        options = {"temperature": 0, "ignore_eos": True}
        long = [client.submit("Once upon a time", max_tokens=1500, **options) for _ in range(3)]
        short = client.submit("The capital of France is", max_tokens=4, **options)
        assert " Paris" in short.result(timeout_s=60).choices[0].text
        keys = Keys("headrace", worker.queue)
        with server.client() as raw:
            for handle in long:
                newest = raw.xrevrange(keys.out(handle.id), count=1)[0][1][b"d"]
                assert b"finished" not in newest, "a long one has ended before the short one"
        for handle in long:
            assert handle.cancel()
