"""Kernels with a fault put in: a check that does not fail on them is no check.

    FAULTS = [
        Fault("merge", "split < to_split", "split <= to_split"),
    ]

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    def test_each_fault_is_found(fault: Fault) -> None:
        assert_found(fault, check, "decode", "shared_prefix")

where check(decode, shared_prefix) takes freshly loaded modules and fails with an AssertionError, or makes the
interpreter see an address outside, an overflow or a clash, if they are wrong. It must only use what it is given: what
the test file has imported is the sound kernel. A `before` that is not in the source exactly `times` times is an error,
so that a fault does not become none when the kernel is rewritten; so is a check that fails for other reasons, such as
a kernel that no longer compiles. Checks should be small: each fault is a run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.interpreter import KernelFaultError

PACKAGE = "headrace.kernels.gpu"


@dataclass(frozen=True)
class Fault:
    """A textual change of a module of kernels/gpu, all its places at once."""

    module: str
    before: str
    after: str
    times: int = 1  # how often `before` is in the source

    def __str__(self) -> str:
        return f"{self.module}: {self.after}"


def assert_found(fault: Fault, check: Callable[..., None], *modules: str) -> None:
    """Fail unless check(*modules) fails as a check does when these modules of kernels/gpu have the fault."""
    with faulty(fault, *modules) as loaded:
        try:
            check(*loaded)
        except Exception as error:
            root: BaseException = error
            while root.__cause__ is not None:  # the interpreter packs what a kernel raises into errors of its own
                root = root.__cause__
            if isinstance(root, AssertionError | KernelFaultError):
                return
            raise
    raise AssertionError(f"nobody sees the difference: {fault.module}, {fault.before!r} -> {fault.after!r}")


@contextlib.contextmanager
def faulty(fault: Fault, *modules: str) -> Iterator[list[ModuleType]]:
    """Load modules of kernels/gpu anew, with the fault in every one of them that has or imports it.

    Outside of the context everything is as before.
    """
    names = [name for name in sys.modules if name.startswith(PACKAGE + ".")]
    before = {name: sys.modules.pop(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            _load_changed(fault, Path(folder))
            yield [importlib.import_module(f"{PACKAGE}.{name}") for name in modules]
        finally:
            for name in [name for name in sys.modules if name.startswith(PACKAGE + ".")]:
                del sys.modules[name]
            sys.modules.update(before)
            for name, module in before.items():
                setattr(sys.modules[PACKAGE], name.removeprefix(PACKAGE + "."), module)


def _load_changed(fault: Fault, folder: Path) -> None:
    """Import the changed module under its own name, from a file, because Triton reads the source of its kernels."""
    name = f"{PACKAGE}.{fault.module}"
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, name
    source = Path(found.origin).read_text()
    assert source.count(fault.before) == fault.times, (
        f"{fault.before!r} is {source.count(fault.before)} times in {name}"
    )
    path = folder / f"{fault.module}.py"
    path.write_text(source.replace(fault.before, fault.after))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def seen_with(modules: str, *faults: Fault) -> Callable[[Callable[..., None]], Callable[[Fault | None], None]]:
    """Make a test of a check(*modules): it must pass on the kernels as they are, and fail with each of the faults.

    modules: names in kernels/gpu, with spaces between them.
    """
    names = modules.split()

    def test_of(check: Callable[..., None]) -> Callable[[Fault | None], None]:
        @pytest.mark.parametrize("fault", [None, *faults], ids=lambda fault: str(fault or "sound"))
        def test(fault: Fault | None) -> None:
            if fault is None:
                check(*(importlib.import_module(f"{PACKAGE}.{name}") for name in names))
            else:
                assert_found(fault, check, *names)

        test.__doc__ = check.__doc__
        return test

    return test_of
