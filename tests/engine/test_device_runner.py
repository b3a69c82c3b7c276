"""The runner for devices on a stand-in that judges: the tokens of steps one after the other, whatever the pace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine.device_runner import graph_sizes
from headrace.engine.types import Plan
from tests.support.checkpoints import SHAPES
from tests.support.device_rig import SIZES, device_rig
from tests.support.stand_in import PACES, Pace
from tests.support.torch_rig import TorchRig, prompt, rig

SHAPE = SHAPES["gqa3-llama3"]
OPTIONS: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20},
    {"repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0.7, "n": 2, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
    {"prompt_logprobs": 2, "min_tokens": 3, "ignore_eos": False, "stop_token_ids": (3, 4, 5, 6)},
]


def crowd(made: TorchRig, count: int = 10) -> TorchRig:
    for number in range(count):
        options = {"seed": number, "max_tokens": 4 + number, **OPTIONS[number % len(OPTIONS)]}
        made.add(str(number), prompt(4 + 7 * number % 40, SHAPE.vocab, number % 3), **options)
    return made.run()


def assert_same(got: TorchRig, want: TorchRig) -> None:
    assert got.tokens == want.tokens
    for key, outputs in want.outputs.items():
        assert [one.finish for one in got.outputs[key]] == [one.finish for one in outputs]
        for ours, theirs in zip(got.outputs[key], outputs, strict=True):
            for mine, other in zip(
                (*ours.logprobs, *(ours.prompt_logprobs or ())), (*theirs.logprobs, *(theirs.prompt_logprobs or ())),
                strict=True,
            ):  # fmt: skip
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    assert [token for token, _ in mine] == [token for token, _ in other]
                    assert [value for _, value in mine] == pytest.approx([value for _, value in other], abs=1e-4)
    for key, scores in want.logits.items():
        assert torch.equal(torch.stack(got.logits[key][: len(scores)]), torch.stack(scores)), key


@pytest.fixture(scope="module")
def wanted() -> TorchRig:
    return crowd(rig(SHAPE, "torch", **SIZES))


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_tokens_and_scores_of_the_plain_runner(wanted: TorchRig, pace: Pace, graphs: bool) -> None:
    made = crowd(device_rig(SHAPE, pace, graphs=graphs))
    assert_same(made, wanted)
    device = made.runner.stand_in  # type: ignore[attr-defined]
    assert (device.replays > 10) == graphs
    assert made.engine.stats().free_blocks == made.engine.stats().total_blocks


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("most", [1, 2, 5, 8, 13, 64, 250, 256])
def test_every_number_of_sequences_has_a_graph(most: int, multiple: int) -> None:
    sizes = graph_sizes(most, multiple)
    assert sizes == sorted(set(sizes)) and all(size % multiple == 0 for size in sizes)
    for count in range(1, most + 1):
        held = min(size for size in sizes if size >= count)
        assert held - count < max(8, multiple), "no more than eight rows are computed for nobody"
    assert len(sizes) <= most // 8 + 5


def test_steps_of_single_tokens_are_replays_and_no_others() -> None:
    made = device_rig(SHAPE, "eager")
    device = made.runner.stand_in  # type: ignore[attr-defined]
    for count in range(1, SIZES["max_num_seqs"] + 1):
        replays = device.replays
        for number in range(count):
            made.add(f"{count}-{number}", prompt(5, SHAPE.vocab, number), max_tokens=4)
        made.run()
        assert device.replays - replays == 3, "of four steps the first has the prompts"


class Watched:
    """A graph that looks, at each replay, which vectors of the cache it writes."""

    def __init__(self, made: TorchRig) -> None:
        self.made, self.written = made, list[set[int]]()
        runner = made.runner
        for shape, graph in runner._graphs.items():  # type: ignore[attr-defined]
            runner._graphs[shape] = _Graph(graph, self)  # type: ignore[attr-defined]

    def slots(self) -> torch.Tensor:
        """Bytes of each position's keys and values, over all layers: [positions, …]."""
        (layers,) = self.made.runner._cache.groups  # type: ignore[attr-defined]
        whole = layers.view(torch.uint8).transpose(0, 2).transpose(1, 3)  # blocks, positions in them, …
        return whole.reshape(whole.shape[0] * whole.shape[1], -1).clone()


class _Graph:
    def __init__(self, graph: Any, watched: Watched) -> None:
        self._graph, self._watched = graph, watched

    def replay(self) -> None:
        before = self._watched.slots()
        self._graph.replay()
        changed = (self._watched.slots() != before).any(dim=1).nonzero().squeeze(1).tolist()
        self._watched.written.append(set(changed))


def test_padded_rows_touch_no_block() -> None:
    """Five sequences in a graph for eight: exactly their five slots change, whatever is in the other blocks."""
    made = device_rig(SHAPE, "eager", depth=1)
    watched = Watched(made)
    for number in range(5):
        made.add(str(number), prompt(5 + number, SHAPE.vocab, number), max_tokens=8)
    expected: list[set[int]] = []
    begin, size = made.runner.begin, made.runner.block_size  # type: ignore[attr-defined]

    def noting(plan: Plan) -> object:
        if plan.num_tokens == len(plan.rows):
            places = [(row.sequence.block_ids[row.start // size], row.start % size) for row in plan.rows]
            expected.append({block * size + offset for block, offset in places})
        return begin(plan)

    made.runner.begin = noting  # type: ignore[attr-defined]
    made.run()  # before each step all free blocks become NaN
    assert expected and watched.written == expected


@pytest.mark.parametrize("graphs", [True, False])
def test_neighbours_change_no_bit(graphs: bool) -> None:
    alone, beside = (device_rig(SHAPE, "random", graphs=graphs, seed=3) for _ in range(2))
    for made, company in ((alone, 0), (beside, 6)):
        made.add("me", prompt(30, SHAPE.vocab), max_tokens=12)
        for number in range(company):
            made.add(str(number), prompt(3 + 5 * number, SHAPE.vocab, number), max_tokens=3 + 2 * number)
        made.run()
    assert torch.equal(alone.scores("me"), beside.scores("me"))


def test_what_is_not_finite_ends_its_own_request_alone() -> None:
    made = device_rig(SHAPE, "lazy")
    made.add("good", prompt(6, SHAPE.vocab), max_tokens=10)
    made.add("bad", prompt(6, SHAPE.vocab, 1), max_tokens=10)
    for _ in range(3):
        made.step()
    bad = made.engine._live["bad"].choices[0]
    made.runner.poison_blocks(bad.block_ids[:1])
    made.run()
    assert made.finishes["bad", 0].error == "numeric"
    assert made.finishes["good", 0].reason == "length"
    alone = device_rig(SHAPE, "lazy")
    alone.add("good", prompt(6, SHAPE.vocab), max_tokens=10)
    assert made.tokens["good", 0] == alone.run().tokens["good", 0]
