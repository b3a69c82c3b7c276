"""Graphs of the device without a GPU: they do again what was recorded, on whatever is in the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.engine.device import WARM_UPS
from tests.support.stand_in import PACES, Pace, StandIn, StandInGraph
from tests.support.watched_work import DeviceFaultError

BOTH_MODES = pytest.mark.parametrize("inference", [False, True])


def replayed(device: StandIn, graph: StandInGraph) -> None:
    graph.replay()
    device.mark().wait()


@pytest.mark.parametrize("pace", PACES)
@BOTH_MODES
def test_a_graph_computes_what_its_inputs_hold_at_its_turn(pace: Pace, inference: bool) -> None:
    device, generator = StandIn(pace), torch.Generator().manual_seed(0)
    table, weight = (torch.randn(each, generator=generator) for each in ((11, 8), (6, 8)))
    token_ids, slots, cache = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(7, 6)
    out, expected_cache = torch.empty(3, 6), torch.zeros(7, 6)
    host, back = device.pinned(2, 3, dtype=torch.int64), device.pinned(3, 6, dtype=torch.float32)

    def network(cache: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(token_ids, table)
        x = torch.nn.functional.linear(x, weight)
        x = (x.view(3, 2, 3).transpose(0, 1) * 2).reshape(2, -1).softmax(-1).view(2, 3, 3).transpose(0, 1)
        cache[slots] = x.reshape(3, 6)
        return torch.cat([cache[slots][:, 3:], cache.sum(0).expand(3, 6)[:, :3]], 1)

    with torch.inference_mode(inference):
        graph = device.capture(lambda: out.copy_(network(cache)))
        cache.zero_()
        for step in range(3):
            host[0], host[1] = torch.arange(3) + step, torch.tensor([6, 1, 3]) - step % 2
            device.copy(token_ids, host[0])
            device.copy(slots, host[1])
            graph.replay()
            device.copy(back, out)
            device.mark().wait()
            assert torch.equal(back, network(expected_cache))  # the same operations, so the same bits
            assert torch.equal(cache, expected_cache)
    assert (device.captures, device.replays) == (1, 3)
    assert {"aten.embedding.default", "aten.mm.default", "aten.index_put_.default"} < set(graph.ops)


def test_numbers_are_frozen() -> None:
    device, x, out, numbers = StandIn(), torch.ones(2), torch.zeros(3, 2), [2.0, 1]
    graph = device.capture(lambda: out[numbers[1]].copy_(x * numbers[0]))
    out.zero_()
    numbers[:] = [5.0, 2]
    replayed(device, graph)
    assert out.tolist() == [[0, 0], [2, 2], [0, 0]]


def test_a_graph_keeps_the_memory_that_it_was_recorded_with() -> None:
    device, x, out = StandIn(), torch.ones(2), torch.zeros(2)
    graph = device.capture(lambda: out.copy_(x))
    old, x.data = x.detach(), torch.full((2,), 7.0)
    old.fill_(3.0)
    replayed(device, graph)
    assert out.tolist() == [3, 3]


@BOTH_MODES
def test_warm_ups_are_done_and_the_recorded_run_is_not(inference: bool) -> None:
    device, count, kept, calls = StandIn(), torch.zeros(2), list[Tensor](), list[int]()
    device.put(lambda: count.add_(10))

    def work() -> None:
        calls.append(0)
        kept.append(count[1:].add_(1) * 2)

    with torch.inference_mode(inference):
        graph = device.capture(work)
    assert len(calls) == WARM_UPS + 1
    assert count.tolist() == [10, 10 + WARM_UPS]
    assert kept[-1].isnan().all()  # nothing has been computed there
    at = kept[-1].data_ptr()
    replayed(device, graph)
    assert count.tolist() == [10, 11 + WARM_UPS]
    assert (kept[-1].tolist(), kept[-1].data_ptr()) == ([2 * (11 + WARM_UPS)], at)
    count.zero_()
    replayed(device, graph)
    assert kept[-1].tolist() == [2]


@pytest.mark.parametrize(
    "make",
    [
        lambda _: torch.empty(2),
        torch.empty_like,
        lambda x: x.new_empty(2),
        lambda _: torch.empty_strided((2,), (1,)),
        lambda x: x.new_empty_strided((2,), (1,)),
    ],
)
@BOTH_MODES
def test_memory_that_is_not_filled_holds_anything(make: Callable[[Tensor], Tensor], inference: bool) -> None:
    """Here: what was left in it before would have been good."""
    device, x, out = StandIn(), torch.zeros(2), torch.zeros(2)

    def work() -> None:
        room = make(x)
        out.copy_(room)
        room.fill_(1.0)

    with torch.inference_mode(inference):
        graph = device.capture(work)
    for _ in range(2):
        out.zero_()
        replayed(device, graph)
        assert out.isnan().all()


def test_memory_that_is_filled_is_filled_again() -> None:
    device, kept = StandIn(), list[Tensor]()

    def work() -> None:
        kept[:] = [torch.zeros(2), torch.full((2,), 3.0), torch.arange(2.0)]
        for each in kept:
            each.add_(1)

    graph = device.capture(work)
    for _ in range(2):
        replayed(device, graph)
        assert [each.tolist() for each in kept] == [[1, 1], [4, 4], [1, 2]]


def test_operations_with_several_results_and_lists() -> None:
    device, x, out = StandIn(), torch.tensor([[3.0, 1.0, 2.0]]), torch.zeros(1, 3)

    def work() -> None:
        values, places = x.sort(dim=-1)
        first, rest = values.split([1, 2], dim=-1)
        out.copy_(torch.cat([places[:, :1].float(), first, rest[:, 1:]], -1))
        torch._foreach_add_([out, x], 1.0)

    graph = device.capture(work)
    x.copy_(torch.tensor([[5.0, 9.0, 4.0]]))
    replayed(device, graph)
    assert (out.tolist(), x.tolist()) == ([[3, 5, 10]], [[6, 10, 5]])


REFUSED = {
    "aten.rand.default draws": lambda _: torch.rand(2),
    "aten.bernoulli_.float draws": lambda x: x.bernoulli_(0.5),
    "draws random": lambda x: torch.nn.functional.dropout(x, 0.5),
    "data of the host": lambda _: torch.tensor([1.0]),
    "lift_fresh.* data of the host": lambda x: x[[1, 0]],
    "brings data of the host": lambda _: torch.from_numpy(__import__("numpy").zeros(1)),
    "data_ptr in a capture": lambda x: x.data_ptr(),
    "resize_.* moves a tensor": lambda _: torch.empty(2).resize_(5),
    "set_.* moves a tensor": lambda x: x.set_(torch.zeros(2)),
    "unsqueeze_.* changes its shape": lambda x: x.unsqueeze_(0),
    "add.out moves": lambda x: torch.add(x, x, out=torch.empty(0)),
}


@pytest.mark.parametrize("message", REFUSED)
@BOTH_MODES
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_a_capture_refuses(message: str, inference: bool) -> None:
    device = StandIn()
    x, good, calls = torch.ones(2), torch.ones(2), list[int]()
    device.pinned(1, dtype=torch.float32)  # so that there is an address with which others are compared

    def work() -> None:
        good.add_(1)
        calls.append(0)
        REFUSED[message](x)

    with torch.inference_mode(inference), pytest.raises(DeviceFaultError, match=message):
        device.capture(work)
    assert len(calls) == WARM_UPS + 1
    assert good.tolist() == [1 + WARM_UPS] * 2  # and the recorded run has left nothing
    assert device.captures == 0
    device.put(lambda: good.add_(1))  # it still works
    device.mark().wait()
