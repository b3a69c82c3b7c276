"""A CUDA graph's behaviour without a GPU: the operations of some work, done again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from .watched_work import (
    ADDRESS,
    DeviceFaultError,
    Launch,
    OpaqueLaunch,
    Operation,
    Watch,
    is_random,
    poison,
    tensors_in,
)

_UNFILLED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


class Recorder(Watch):
    """Records what it sees.

    Work is done while it is recorded, since its later steps need shapes and Python code needs results, but as a
    capture on a GPU does nothing, `undo` takes back what was done to outer memory, and poisons the graph's own.
    """

    def __init__(
        self, see: Callable[[Operation, Any, Any], None], made: Callable[[list[torch.Tensor]], None] | None = None
    ) -> None:
        super().__init__(see, made)
        self.names: list[str] = []  # of all operations and kernels, views among them
        self._steps: list[Callable[[], None]] = []
        self._made: list[torch.Tensor] = []  # memory of the graph's own
        self._own: set[int] = set()  # its storages
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storages from outside: their bytes, a copy
        self._performing = False

    def perform(self, func: Operation, args: Any, kwargs: Any) -> Any:
        """Do and record an operation."""
        self._refuse(func, args, kwargs)
        written = _written(func, args, kwargs)
        self._save(written)
        places = [_place(each) for each in written]
        self._performing = True
        try:
            results = func(*args, **kwargs)
        finally:
            self._performing = False
        if places != [_place(each) for each in written]:
            raise DeviceFaultError(f"{func} moves a tensor or changes its shape in a capture")
        self._record(func, args, kwargs, results)
        return results

    def launch(self, launch: Launch, call: Any) -> None:
        """Run and record a kernel."""
        if self._performing:  # the operation that it belongs to is recorded
            launch.run(call)
            return
        with no_dispatch():
            self._save(tensors_in((launch.args, launch.options)))  # it may write to any
            again = launch.again(_alias)
        launch.run(call)
        if isinstance(launch, OpaqueLaunch):
            made = tensors_in(launch.results)
            self._made += made
            self._own |= {each.untyped_storage()._cdata for each in made}
        self.names.append(launch.name)
        self._steps.append(again.run)

    def see_call(self, name: str) -> None:
        """Refuse what nobody can see."""
        if name == ADDRESS:
            raise DeviceFaultError("data_ptr in a capture: what is done with an address is not recorded")

    def undo(self) -> None:
        """Leave outer memory as it was and the graph's with anything in it."""
        with torch.inference_mode():
            for memory, before in self._before.values():
                memory.copy_(before)
            for each in self._made:
                poison(each)

    def run(self) -> None:
        """Do it all again."""
        with torch.inference_mode():
            for step in self._steps:
                step()

    def _refuse(self, func: Operation, args: Any, kwargs: Any) -> None:
        if is_random(func, args, kwargs):
            raise DeviceFaultError(f"{func} draws random numbers in a capture")
        if func._overloadpacket.__name__ == "lift_fresh":
            raise DeviceFaultError(f"{func} brings data of the host into a capture")

    def _save(self, tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            storage = each.untyped_storage()
            if storage._cdata not in self._own and storage._cdata not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage._cdata] = memory, memory.clone()

    def _record(self, func: Operation, args: Any, kwargs: Any, results: Any) -> None:
        self.names.append(str(func))
        given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        made = {
            number: each.detach()
            for number, each in enumerate(tensors_in(results))
            if each.untyped_storage()._cdata not in given
        }
        self._made += made.values()
        self._own |= {each.untyped_storage()._cdata for each in made.values()}
        if func._overloadpacket.__name__ in _UNFILLED:
            self._steps += [partial(poison, each) for each in made.values()]
        elif made or func._schema.is_mutable:  # else a view, which stays valid
            self._steps.append(partial(_again, func, *tree_map(_alias, (args, kwargs)), made))


def _again(func: Operation, args: Any, kwargs: Any, made: dict[int, torch.Tensor]) -> None:
    results = tensors_in(func(*args, **kwargs))
    for number, target in made.items():
        if results[number].shape != target.shape:
            raise DeviceFaultError(f"{func} gives another shape than when it was recorded")
        target.copy_(results[number])


def _alias(value: Any) -> Any:
    """The same memory, even if somebody gives the tensor another one later."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _written(func: Operation, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    for number, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(each.name))
    return tensors_in(found)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return where, tensor.shape, tensor.stride(), tensor.dtype
