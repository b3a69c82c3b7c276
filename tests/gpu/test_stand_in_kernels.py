"""Triton's kernels in work and in graphs of the device without a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from headrace.engine.device import WARM_UPS
from headrace.kernels.gpu.gated import silu_mul
from headrace.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from tests.support import interpreter as strict
from tests.support.stand_in import PACES, Pace, StandIn
from tests.support.watched_work import DeviceFaultError

EPS = 1e-5


@triton.jit
def _add_number(x_ptr, number, WIDTH: tl.constexpr):  # noqa: N803
    """x += number. grid: (1)."""
    at = x_ptr + tl.arange(0, WIDTH)
    tl.store(at, tl.load(at) + number)


@pytest.fixture(params=["strict", "as shipped"])
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """The way in which kernels are launched."""
    call = strict._new_launch
    if request.param == "as shipped":
        call = strict._launch
        monkeypatch.setattr(strict._Builder, "create_masked_load", strict._load)
        monkeypatch.setattr(strict._Builder, "create_masked_store", strict._store)
        monkeypatch.setattr(interpreter, "_patch_lang", strict._patch)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    return call


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_little_network(pace: Pace, inference: bool, launch: object) -> None:
    device, generator = StandIn(pace), torch.Generator().manual_seed(0)
    sizes = ((11, 8), (8, 16), (8,))
    table, weight, scale = (torch.randn(each, generator=generator) for each in sizes)
    token_ids, slots, cache = torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.zeros(5, 8)
    host, back, out = device.pinned(3, dtype=torch.int64), device.pinned(3, 8, dtype=torch.float32), torch.zeros(3, 8)

    def network(cache: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(token_ids, table)
        x = silu_mul(rms_norm(x, scale, EPS) @ weight)
        cache.index_put_((slots,), x)
        normed, total = add_rms_norm(cache[slots], x, scale, EPS)
        return normed + total

    with torch.inference_mode(inference):
        graph = device.capture(lambda: out.copy_(network(cache)))
        cache.zero_()
        expected = torch.zeros(5, 8)
        for step in range(2):
            host.copy_(torch.tensor([4, 9, 2]) + step)
            slots.copy_(torch.tensor([4, 0, 2]) - step % 2 + step)
            device.copy(token_ids, host)
            graph.replay()
            device.copy(back, out)
            device.mark().wait()
            assert torch.equal(back, network(expected))  # the same operations, so the same bits
            assert torch.equal(cache, expected)
    assert [name for name in graph.ops if not name.startswith("aten.")] == [
        "_rms_norm_rows", "_gated", "_rms_norm_rows",
    ]  # fmt: skip
    assert interpreter.GridExecutor.__call__ is launch


def test_numbers_and_grids_are_frozen_and_the_recorded_run_is_not_done() -> None:
    device, x, numbers, grids = StandIn(), torch.zeros(4), [1.0], [(1,)]
    graph = device.capture(lambda: _add_number[lambda _: grids[0]](x, numbers[0], WIDTH=4))
    assert x.tolist() == [3] * 4
    numbers[0], grids[0] = 100.0, (2,)  # two programs that write to one address: the interpreter would refuse them
    graph.replay()
    device.mark().wait()
    assert x.tolist() == [4] * 4


@pytest.mark.parametrize("way", ["put", "capture"])
def test_a_kernel_must_not_touch_pinned_memory(way: str) -> None:
    device = StandIn("eager")
    host = device.pinned(4, dtype=torch.float32)
    with pytest.raises(DeviceFaultError, match="_add_number touches pinned memory"):
        getattr(device, way)(lambda: _add_number[(1,)](host, 1.0, WIDTH=4))


def test_what_a_kernel_has_touched_is_the_devices() -> None:
    device, x = StandIn("eager"), torch.zeros(4)
    with device.host_reads_are_errors():
        assert x.tolist() == [0] * 4
        device.put(lambda: _add_number[(1,)](x, 1.0, WIDTH=4))
        with pytest.raises(DeviceFaultError, match="the host reads"):
            x.tolist()
        device.capture(lambda: _add_number[(1,)](x, 2.0, WIDTH=4)).replay()  # the interpreter may read
    assert x.tolist() == [1 + (WARM_UPS + 1) * 2] * 4
