"""Cases made on the CPU, kernels called on the device, results held against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import torch

from headrace.kernels.attention import Paging, SharedPrefix
from headrace.kernels.gpu.shapes import Attention, Scratch
from headrace.kernels.rotary import QueryKeyNorm
from tests.support.paged_cases import Case


class Afar:
    """A module of kernels that takes and gives tensors of the CPU, and computes on a device.

    What a kernel changes in place is changed in the tensors that were given. Parameters that lie on the CPU by their
    description (of a draw, of adjustments) stay there.
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module, self._device = module, device

    def __getattr__(self, name: str) -> Any:
        """Give a function of the module."""
        return _afar(getattr(self._module, name), self._device)


def afar(module: ModuleType, device: torch.device) -> ModuleType:
    """`Afar`, as checks take it."""
    return cast("ModuleType", Afar(module, device))


def _afar(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        moved = [_moved(each, device) for each in args]
        result = function(*moved)
        for given, there in zip(args, moved, strict=True):
            if isinstance(given, torch.Tensor) and there is not given:
                _bytes(given).copy_(_bytes(there))
        return _back(result)

    return call


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, QueryKeyNorm):
        return replace(value, query=value.query.to(device), key=value.key.to(device))
    return value


def _back(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_back(each) for each in cast("tuple[Any, ...]", result))
    return result.cpu() if isinstance(result, torch.Tensor) else result


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every operation knows."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def on_device(case: Case, device: torch.device) -> Case:
    """The case with what kernels read on a device."""
    given, shared = case.paging, case.paging.shared
    if shared is not None:
        shared = SharedPrefix(shared.seqs.to(device), shared.tile_len.to(device), shared.own_from.to(device))
    tables = (given.block_table.to(device), given.query_start.to(device), given.kv_len.to(device))
    return replace(
        case,
        query=case.query.to(device),
        k_cache=case.k_cache.to(device),
        v_cache=case.v_cache.to(device),
        paging=Paging(*tables, given.max_queries, shared),
        kv_scales=None if case.kv_scales is None else case.kv_scales.to(device),
    )


def poisoned(case: Case, num_splits: int, split: int, device: torch.device) -> Scratch:
    """Scratch in which everything is NaN, for one sequence more than the batch has."""
    shape = (len(case.lengths) + 1, case.query.shape[1], num_splits)
    parts = torch.full((*shape, case.query.shape[2]), float("nan"), device=device)
    return Scratch(parts, torch.full(shape, float("nan"), device=device), split)


def how_on(case: Case, how: Attention, device: torch.device) -> Attention:
    """Options of a layer with their tensors on a device."""
    sinks = None if how.sinks is None else how.sinks.to(device)
    return replace(how, sinks=sinks, kv_scales=None if case.kv_scales is None else case.kv_scales.to(device))


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise AssertionError where two tensors differ in a bit; NaN of the same bits is equal."""
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (got, want))
    differing = int((one != other).sum())
    if differing:
        raise AssertionError(f"{differing} of {len(one)} bytes differ")
