"""Triton's interpreter, made strict and right, so that kernels can be tested where there is no GPU.

As it is shipped it multiplies the raw bits of bfloat16 in `tl.dot`, truncates where it should round, never saturates
float8, and reads and writes any address. Here

* conversions between float types round to nearest even, and float8 e4m3 saturates as a GPU's conversion does;
* products of matrices are taken in float64 and rounded once, so that a row's bits do not depend on its neighbours;
* an element of a load or a store that is not masked must lie in a tensor that the kernel was given, and within what the
  view of it covers;
* integers that overflow are errors, and so is arithmetic in bfloat16 or float8, whose raw bits the interpreter takes;
* two programs of one launch must not write to one address, nor may one read what another has written.
"""

# pyright: basic
# (the interpreter has no types)

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    tl.float32: (torch.float32, np.float32),
    tl.float16: (torch.float16, np.float16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
RAW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)  # held as bits
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
ARITHMETIC = """fadd fsub fmul fdiv frem fneg fma fabs floor ceil exp exp2 log log2 sqrt rsqrt cos sin erf clampf
    maximumf minimumf maxnumf minnumf precise_divf precise_sqrt
    fcmpOLT fcmpOGT fcmpOLE fcmpOGE fcmpOEQ fcmpONE fcmpULT fcmpUGT fcmpULE fcmpUGE fcmpUEQ fcmpUNE"""
_Builder: Any = interpreter.InterpreterBuilder
_cast, _fp_to_fp, _load, _store = (
    _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_masked_load, _Builder.create_masked_store
)  # fmt: skip
_launch, _patch = interpreter.GridExecutor.__call__, interpreter._patch_lang


class KernelFaultError(Exception):
    """What a GPU would have done in silence."""


def widen(handle: Any) -> np.ndarray:
    """Values of a float handle as float32."""
    kind = handle.dtype.scalar
    if kind not in RAW:
        return handle.data.astype(np.float32)
    signed = np.int16 if TYPES[kind][1] == np.uint16 else np.uint8
    raw = torch.from_numpy(np.array(handle.data).view(signed))
    return raw.view(TYPES[kind][0]).to(torch.float32).numpy().reshape(handle.data.shape)


def narrow(values: np.ndarray, kind: Any) -> np.ndarray:
    """Float32 values in the form in which the interpreter holds a type, rounded to nearest even."""
    torch_type, held = TYPES[kind]
    wide = torch.from_numpy(np.array(values, dtype=np.float32))
    if kind in LARGEST:
        wide = torch.where(wide.isnan(), wide, wide.clamp(-LARGEST[kind], LARGEST[kind]))
    rounded = wide.to(torch_type)
    if kind in RAW:
        rounded = rounded.view(torch.int16 if held == np.uint16 else torch.uint8)
    return rounded.numpy().view(held).reshape(np.shape(values))


def _new_cast(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source in RAW or target in RAW:
        wide = widen(src)
        held = narrow(wide, target) if target in RAW else wide.astype(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(held, target)
    return _cast(self, src, dst_type)


def _new_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source in TYPES and target in TYPES:
        return interpreter.TensorHandle(narrow(widen(src), target), target)
    return _fp_to_fp(self, src, dst_type, rounding)


def _new_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
    rows, inner, columns = a.data.shape[-2], a.data.shape[-1], b.data.shape[-1]
    if rows < 16 or inner < 16 or columns < 8:
        raise KernelFaultError(f"a product of {rows} x {inner} x {columns} is smaller than a GPU's tile")
    product = np.matmul(widen(a).astype(np.float64), widen(b).astype(np.float64)) + d.data
    return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def _refusing(name: str) -> Any:
    original = getattr(_Builder, name)

    def refuse(self: Any, *operands: Any, **options: Any) -> Any:
        for operand in operands:
            if isinstance(operand, interpreter.TensorHandle) and operand.dtype.scalar in RAW:
                raise KernelFaultError(f"{name} on {operand.dtype.scalar}: convert to float32 first")
        return original(self, *operands, **options)

    return refuse


class _Memory:
    """What the kernel that runs may touch, and what of it has been written by whom."""

    def __init__(self) -> None:
        self.begins, self.ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self.written: dict[int, tuple[int, ...]] = {}

    def allow(self, tensors: list[torch.Tensor]) -> None:
        spans = sorted(_span(each) for each in tensors if each.numel())
        self.begins, self.ends = (
            (np.array(each, np.uint64) for each in zip(*spans, strict=True)) if spans else (np.zeros(0, np.uint64),) * 2
        )
        self.written = {}

    def touched(self, pointers: Any, mask: Any, what: str) -> np.ndarray:
        """Addresses of the elements that are not masked, if all are allowed."""
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        at = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape).astype(bool)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(at.shape, bool)
        for begin, end in zip(self.begins, self.ends, strict=True):
            inside |= (at >= begin) & (at + np.uint64(size) <= end)
        if not inside.all():
            raise KernelFaultError(f"{int((~inside).sum())} elements of a {what} are outside of every tensor")
        if at.size and (at % np.uint64(size)).any():
            raise KernelFaultError(f"a {what} of {size} bytes at an address that is no multiple of them")
        return at


_memory = _Memory()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


_patched: set[int] = set()  # modules of the language that the launch has put in the interpreter's form


def _new_patch(function: Any) -> Any:
    """Once a module and launch is enough; it is done at every call of a function, which takes longer than the call."""
    modules = {id(each) for each in function.__globals__.values() if each is tl or each is tl.core}
    if modules <= _patched:
        return interpreter._LangPatchScope()
    _patched.update(modules)
    return _patch(function)


def _new_launch(self: Any, *args: Any, **options: Any) -> Any:
    _patched.clear()
    given = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
    _memory.allow(given)
    return _launch(self, *args, **options)


def _new_load(self: Any, pointers: Any, mask: Any, *how: Any) -> Any:
    at = _memory.touched(pointers, mask, "load")
    if _memory.written:
        me = self.grid_idx
        foreign = [each for each in at.tolist() if _memory.written.get(each, me) != me]
        if foreign:
            raise KernelFaultError(f"{len(foreign)} elements are read that another program of the launch writes")
    return _load(self, pointers, mask, *how)


def _new_store(self: Any, pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
    me, written = self.grid_idx, _memory.written
    for each in _memory.touched(pointers, mask, "store").tolist():
        if written.setdefault(each, me) != me:
            raise KernelFaultError("two programs of the launch write to one address")
    return _store(self, pointers, value, mask, *how)


def repair() -> None:
    """Put all of that in place, for the whole process."""
    if _Builder.create_masked_load is _new_load:
        return
    _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot = _new_cast, _new_fp_to_fp, _new_dot
    _Builder.create_masked_load, _Builder.create_masked_store = _new_load, _new_store
    for name in (f"create_{each}" for each in ARITHMETIC.split()):
        if hasattr(_Builder, name):
            setattr(_Builder, name, _refusing(name))
    interpreter.GridExecutor.__call__ = _new_launch
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _new_patch
    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(interpreter.InterpreterOptions(), debug=True, sanitize_overflow=True)
