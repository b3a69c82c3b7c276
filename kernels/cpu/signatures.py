"""What the compiled library's functions take and give, for ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

from .structs import Attention, Experts, Gate, MatrixPointer, Norm, Operation, Product, Rotation, ScoresCall, Step, Sum

_AT, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_POINTER = ctypes.POINTER
RESULTS: dict[str, Any] = {
    "headrace_begin": _AT,
    "headrace_compress": _INT64,
    "headrace_screen_bytes": _INT64,
    "headrace_screen": _INT,
    "headrace_score_bounds": ctypes.c_float,
}
SIGNATURES: dict[str, list[Any]] = {
    "headrace_norm": [_POINTER(Norm), _INT],
    "headrace_rotate_and_store": [_POINTER(Rotation), _INT],
    "headrace_add": [_POINTER(Sum), _INT],
    "headrace_gate": [_POINTER(Gate), _INT],
    "headrace_cap_scores": [_AT, _INT64, _INT64, ctypes.c_float, ctypes.c_float, _INT],
    "headrace_experts": [_POINTER(Experts), _INT],
    "headrace_paged_attention": [_POINTER(Attention), _INT],
    "headrace_pack": [_POINTER(MatrixPointer), _INT],
    "headrace_compress": [_POINTER(MatrixPointer), _INT],
    "headrace_product": [_POINTER(Product), _INT, _INT],
    "headrace_rows": [_POINTER(MatrixPointer), _AT, _INT64, ctypes.c_float, _AT, _INT],
    "headrace_screen_bytes": [_INT64] * 2,
    "headrace_screen": [_POINTER(MatrixPointer), _AT, _INT],
    "headrace_score_bounds": [_POINTER(ScoresCall), _AT, _AT],
    "headrace_scores": [_POINTER(ScoresCall), _INT],
    "headrace_begin": [_POINTER(Operation), _INT64, _POINTER(Step), _POINTER(ScoresCall), _INT],
    "headrace_finish": [_AT],
    "headrace_sample": [_AT] * 9 + [_INT64] * 2 + [_INT],
    "headrace_token_words": [_INT64] * 3 + [_AT, _INT64, _AT],
}
