"""The device without a GPU: it must be right for sound users, and see what is wrong with the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.engine.device import Device
from tests.support.stand_in import PACES, Pace, StandIn
from tests.support.watched_work import DeviceFaultError

EVERY_PACE = pytest.mark.parametrize("pace", PACES)
SEEDS = range(20)
SMALLEST = torch.iinfo(torch.int64).min


def fresh(*values: float) -> Tensor:
    return torch.tensor(values)


def steps_of(device: Device) -> list[list[int]]:
    """Two buffers in turn, two steps in flight, each on what the one before has left on the device."""
    state, given = torch.zeros(3, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    inputs = [device.pinned(3, dtype=torch.int64) for _ in range(2)]
    outputs = [device.pinned(3, dtype=torch.int64) for _ in range(2)]

    def work() -> None:
        state.mul_(3).add_(given)

    marks, results = [], []
    for step in range(6):
        if step >= 2:
            marks[step - 2].wait()
            results.append(outputs[step % 2].tolist())
        inputs[step % 2].copy_(torch.arange(3) + step)
        device.copy(given, inputs[step % 2])
        device.put(work)
        device.copy(outputs[step % 2], state)
        marks.append(device.mark())
    return results


def test_a_sound_user_gets_the_same_at_every_pace() -> None:
    expected, state = [], torch.zeros(3, dtype=torch.int64)
    for step in range(4):
        state = state * 3 + torch.arange(3) + step
        expected.append(state.tolist())
    devices = [StandIn("lazy"), StandIn("eager"), *(StandIn("random", seed) for seed in SEEDS)]
    assert all(steps_of(device) == expected for device in devices)
    assert [devices[0].executed, devices[1].executed] == [4 * 3, 6 * 3]
    assert len({device.executed for device in devices[2:]}) > 1  # paces differ indeed


def test_an_entry_is_done_when_its_mark_is_waited_for() -> None:
    device, done = StandIn("lazy"), list[int]()
    marks = []
    for number in range(3):
        device.put(lambda number=number: done.append(number))
        marks.append(device.mark())
    assert done == []
    marks[1].wait()
    assert done == [0, 1]
    marks[0].wait()
    assert done == [0, 1]
    marks[2].wait()
    assert done == [0, 1, 2]


def test_work_that_reads_a_number_of_the_host_late_differs_between_paces() -> None:
    def last(pace: Pace) -> float:
        device, out, numbers = StandIn(pace), torch.zeros(1), [1.0]
        device.put(lambda: out.fill_(numbers[0]))
        numbers[0] = 2.0
        device.mark().wait()
        return out.item()

    assert last("eager") != last("lazy")


@pytest.mark.parametrize("device", [StandIn("lazy"), *(StandIn("random", seed) for seed in SEEDS)])
def test_a_source_that_is_overwritten_is_found(device: StandIn) -> None:
    host, there = device.pinned(2, 2, dtype=torch.float32), torch.zeros(2, 2)
    device.copy(there, host)
    early = device.executed
    host[1, 0] = 1.0
    if early:  # the copy was faster
        device.mark().wait()
        assert there.tolist() == [[0, 0], [0, 0]]
        return
    with pytest.raises(DeviceFaultError, match=r"pinned memory \[2, 2\] was changed while a copy from it"):
        device.mark().wait()


def test_a_target_that_is_written_is_found() -> None:
    device = StandIn("lazy")
    host = device.pinned(2, dtype=torch.float32)
    device.copy(host, torch.ones(2))
    host[0] = 0.0
    with pytest.raises(DeviceFaultError, match="while a copy to it"):
        device.mark().wait()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [(torch.int64, SMALLEST), (torch.int8, -128), (torch.uint8, 255), (torch.bool, True), (torch.bfloat16, None)],
)
def test_a_target_is_poison_until_its_mark(dtype: torch.dtype, poison: int | None) -> None:
    device = StandIn("lazy")
    host = device.pinned(2, dtype=dtype)
    device.copy(host, torch.zeros(2, dtype=dtype))
    mark = device.mark()
    assert host.isnan().all() if poison is None else host.tolist() == [poison, poison]
    mark.wait()
    assert host.tolist() == [0, 0]


def test_host_memory_may_be_in_the_line_twice() -> None:
    """The line is in order: that is sound as long as the host leaves it alone."""
    device = StandIn("lazy")
    host, first, second, third = (
        device.pinned(2, dtype=torch.float32),
        fresh(1.0, 2.0),
        fresh(3.0, 4.0),
        fresh(0.0, 0.0),
    )
    host.fill_(9.0)
    device.copy(third, host)
    device.copy(host, first)
    device.copy(first, host)
    device.copy(host, second)
    device.mark().wait()
    assert (third.tolist(), first.tolist(), host.tolist()) == ([9, 9], [1, 2], [3, 4])


def test_copies_between_device_tensors_may_be_of_any_kind() -> None:
    device, wide = StandIn("lazy"), torch.zeros(2, 3)
    device.copy(wide[:, 1], torch.tensor([1, 2]))
    device.mark().wait()
    assert wide.tolist() == [[0, 1, 0], [0, 2, 0]]


@pytest.mark.parametrize(
    "pair",
    [
        lambda host: (host, host[:]),
        lambda host: (torch.zeros(2, 3, dtype=torch.float16), host),
        lambda host: (torch.zeros(4, 2, 3), host),
        lambda host: (torch.zeros(2), host[:, 0]),
        lambda host: (host[:, 0], torch.zeros(2)),
    ],
)
def test_copies_that_wait_are_refused(pair: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    device = StandIn("eager")
    with pytest.raises(DeviceFaultError, match="a copy that waits"):
        device.copy(*pair(device.pinned(2, 3, dtype=torch.float32)))


PINNED_USES = {
    "read": lambda host: torch.ones(2) + host,
    "written": lambda host: host.add_(1),
    "written as out": lambda host: torch.add(torch.ones(2), 1.0, out=host),
    "a view": lambda host: host[1:].neg(),
    "through NumPy": lambda host: torch.from_numpy(host.numpy()[1:]).neg(),
    "in a list": lambda host: torch.cat([torch.ones(2), host]),
}


@pytest.mark.parametrize("use", PINNED_USES.values(), ids=PINNED_USES)
@pytest.mark.parametrize("way", ["put", "capture"])
def test_work_must_not_touch_pinned_memory(use: Callable[[Tensor], object], way: str) -> None:
    device = StandIn("eager")
    host = device.pinned(2, dtype=torch.float32)
    seen = torch.from_numpy(host.numpy()[1:]) if use is PINNED_USES["through NumPy"] else host
    with pytest.raises(DeviceFaultError, match="touches pinned memory"):
        getattr(device, way)(lambda: seen.neg() if seen is not host else use(host))


WAITS = {
    "_local_scalar_dense": lambda x: x[0].item(),
    "aten._local_scalar_dense": lambda x: [1, 2, 3][x[1].long()],
    "_local_scalar_dense.default": lambda x: bool(x.sum() > 0),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "aten.nonzero": lambda x: torch.where(x > 0),
    "index.Tensor": lambda x: x[x > 0],
    "index_put_": lambda x: x.__setitem__(x > 0, fresh(1.0)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "_unique2": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(3).long()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "__array__": lambda x: __import__("numpy").asarray(x),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("way", ["put", "capture"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_work_must_not_make_the_host_wait(name: str, inference: bool, way: str) -> None:
    device, x = StandIn("eager"), fresh(0.0, 1.0, 2.0)
    with torch.inference_mode(inference), pytest.raises(DeviceFaultError, match=rf"\b{name}\b.* makes the host wait"):
        getattr(device, way)(lambda: WAITS[name](x))


def test_work_that_only_looks_like_waiting_is_done() -> None:
    device, x = StandIn("eager"), fresh(0.0, 1.0, 2.0)
    times, places = torch.tensor([1, 0, 2]), torch.tensor([2, 0])
    q = torch.ones(1, 1, 2, 4)

    def work() -> None:
        x.repeat_interleave(times, output_size=3)
        x[places] = x[places] + 1
        x.masked_fill_(x > 2, 0.0)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    device.put(work)
    device.capture(work)


@EVERY_PACE
def test_work_must_not_use_the_device(pace: Pace) -> None:
    device = StandIn(pace)
    x = torch.zeros(1)
    inner: list[Callable[[], object]] = [
        device.mark, lambda: device.put(x.neg), lambda: device.copy(x, x), lambda: device.capture(x.neg),
        device.capture(x.neg).replay, device.mark().wait,
    ]  # fmt: skip
    for use in inner:
        with pytest.raises(DeviceFaultError, match="may not use the device"):
            device.put(use)
            device.mark().wait()
        with pytest.raises(DeviceFaultError, match="may not use the device"):
            device.capture(use)


def test_after_a_failure_the_rest_of_the_line_is_done() -> None:
    device, x = StandIn("lazy"), torch.zeros(2)
    device.put(lambda: x[5])
    device.put(lambda: x.add_(1))
    mark = device.mark()
    with pytest.raises(IndexError):
        mark.wait()
    mark.wait()
    assert x.tolist() == [1, 1]


def test_host_reads_of_device_memory_are_found() -> None:
    device = StandIn("eager")
    x, untouched, host, made = torch.ones(2), torch.ones(2), device.pinned(2, dtype=torch.float32), list[Tensor]()
    device.put(lambda: made.append(x + 1))
    device.copy(host, x)
    with device.host_reads_are_errors():
        for each in (x, made[0], x[1:]):
            for read in (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero, lambda each: each[0].item()):
                with pytest.raises(DeviceFaultError, match="the host reads"):
                    read(each)
        assert (host.tolist(), host[0].item(), untouched.numpy().sum(), untouched[0].item()) == ([1, 1], 1, 2, 1)
        assert fresh(1.0)[0].item() == 1  # new memory, whatever address it has
        with pytest.raises(DeviceFaultError, match="makes the host wait"):
            device.put(lambda: x.sum().item())
        device.capture(x.neg)
        device.put(x.data_ptr)
    assert x.tolist() == [1, 1]
    assert device.captures == 1
