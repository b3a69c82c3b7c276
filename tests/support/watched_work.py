"""What is done with tensors, seen step by step: torch's operations, calls that read memory, and launches of kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Operation = torch._ops.OpOverload
READS = {"tolist", "numpy", "cpu", "__array__", "__dlpack__"}  # on a CPU these are no operations
ADDRESS = "data_ptr"
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DeviceFaultError(Exception):
    """What a GPU would have refused, or got wrong in silence."""


class Watch(TorchDispatchMode):
    """Has each operation seen before it is done, and its results after. Composite ones, which inference mode leaves
    whole, are taken apart.
    """

    def __init__(
        self, see: Callable[[Operation, Any, Any], None], made: Callable[[list[torch.Tensor]], None] | None = None
    ) -> None:
        super().__init__()
        self._see, self._see_made = see, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # what the observer reads is not the work's
            self._see(func, args, kwargs)
        results = self.perform(func, args, kwargs)
        if self._see_made is not None:
            self._see_made(tensors_in(results))
        return results

    def perform(self, func: Operation, args: Any, kwargs: Any) -> Any:
        """Do it."""
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __init__(self, see: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or name == ADDRESS:
            self._see(name, args[0])
        return func(*args, **(kwargs or {}))


class Launch:
    """A kernel that is about to run in Triton's interpreter."""

    def __init__(self, executor: Any, args: Any, options: Any) -> None:
        self.name: str = executor.fn.__name__
        self.executor, self.args, self.options = executor, args, options
        if callable(executor.grid):
            executor.grid = _asked_once(executor.grid)

    def run(self, call: Callable[..., None] | None = None) -> None:
        """Run it, by default as launches are run now; what the interpreter does with tensors is not seen."""
        with no_dispatch():
            (call or type(self.executor).__call__)(self.executor, *self.args, **self.options)

    def again(self, alias: Callable[[Any], Any]) -> Launch:
        """The same with arguments that stay as they are."""
        return Launch(self.executor, *tree_map(alias, (self.args, self.options)))


class OpaqueLaunch(Launch):
    """A function that stands for a kernel: what it does inside is not seen, and its results stay where they are."""

    def __init__(self, function: Callable[..., Any], args: Any, options: Any, results: list[Any] | None = None) -> None:
        self.name = function.__name__
        self._function, self.args, self.options = function, args, options
        self.results: list[Any] = [] if results is None else results  # one, after the first run

    def run(self, call: Callable[..., None] | None = None) -> None:
        """Run it, a second time into the results of the first."""
        del call
        with no_dispatch(), torch._C.DisableTorchFunction():
            result = self._function(*self.args, **self.options)
            if not self.results:
                self.results.append(result)
            for kept, new in zip(tensors_in(self.results[0]), tensors_in(result), strict=True):
                if kept is not new:
                    kept.copy_(new)

    def again(self, alias: Callable[[Any], Any]) -> OpaqueLaunch:
        """The same with arguments that stay as they are, and the same results."""
        return OpaqueLaunch(self._function, *tree_map(alias, (self.args, self.options)), self.results)


_watchers: list[Callable[[Launch, Any], None]] = []  # the innermost last


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function count as one launch where it is watched: a plain reference in the place of a kernel."""

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        if not _watchers:
            return function(*args, **options)
        launch = OpaqueLaunch(function, args, options)
        with torch._C.DisableTorchFunction():
            _watchers[-1](launch, None)
        return launch.results[0]

    return called


@contextmanager
def watching(
    operations: Watch, see_call: Callable[[str, torch.Tensor], None], launch: Callable[[Launch, Any], None]
) -> Iterator[None]:
    """Within, operations, calls that read and launches are seen; `launch` has to do `Launch.run` with its argument."""
    _watchers.append(launch)
    try:
        with _launches(launch), _Calls(see_call), operations:
            yield
    finally:
        _watchers.pop()


@contextmanager
def _launches(launch: Callable[[Launch, Any], None]) -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    before = GridExecutor.__call__

    def seen(self: Any, *args: Any, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(Launch(self, args, options), before)

    GridExecutor.__call__ = seen
    try:
        yield
    finally:
        GridExecutor.__call__ = before


def _asked_once(grid: Callable[[Any], Any]) -> Callable[[Any], Any]:
    shapes: list[Any] = []

    def answer(meta: Any) -> Any:
        if not shapes:
            shapes.append(grid(meta))
        return shapes[0]

    return answer


def makes_the_host_wait(func: Operation, args: Any, kwargs: Any) -> bool:
    """Whether a value, or how many there are, must be known before the host can go on."""
    name = func._overloadpacket.__name__
    if name in _INDEXING:
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(args[1]))
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return not _WAITING.isdisjoint(func.tags)


def is_random(func: Operation, args: Any, kwargs: Any) -> bool:
    """Whether it draws numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return argument(func, args, kwargs, "dropout_p") != 0  # attention draws for nothing else


def argument(func: Operation, args: Any, kwargs: Any, name: str) -> Any:
    """Give an argument's value, or its default, or None if there is none of that name."""
    for number, each in enumerate(func._schema.arguments):
        if each.name == name:
            return args[number] if number < len(args) else kwargs.get(name, each.default_value)
    return None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Give all tensors in lists, tuples and dicts."""
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, the smallest integer, the largest if it has no sign, or true."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(value=True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min or limits.max)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Give a copy of the bytes, uint8 [bytes]: those of NaN are equal to themselves."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
