"""The structures of ops.h, product.h, score.h and program.cpp, field by field."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

_KINDS = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}


def _fields(kinds: dict[str, str]) -> list[tuple[str, Any]]:
    """Fields in order: names, separated by blanks, under the letter of their kind."""
    return [(name, _KINDS[kind[0]]) for kind, names in kinds.items() for name in names.split()]


class MatrixPointer(ctypes.Structure):
    """`Matrix`."""

    _fields_: ClassVar = _fields({"p": "values", "q": "outputs inputs", "i": "bf16 compressed"})


class Product(ctypes.Structure):
    """`Product`."""

    _fields_: ClassVar = [
        ("x", ctypes.c_void_p), ("matrix", MatrixPointer),
        *_fields({"p": "bias out", "q": "rows", "f": "scale", "i": "activation"}),
    ]  # fmt: skip


class ScoresCall(ctypes.Structure):
    """`Scores`."""

    _fields_: ClassVar = [
        *_fields({"p": "x rows", "q": "num_rows num_best"}), ("matrix", MatrixPointer),
        *_fields({"p": "screen scores best finite"}),
    ]  # fmt: skip


class Norm(ctypes.Structure):
    """`Norm`."""

    _fields_: ClassVar = _fields({"p": "x residual weight out total", "q": "rows hidden", "f": "eps", "i": "bf16"})


class Rotation(ctypes.Structure):
    """`Rotation`."""

    _fields_: ClassVar = _fields({
        "p": "qkv positions slots cos_sin query_norm key_norm k_cache v_cache query",
        "q": "rows heads kv_heads head_dim rotary_dim block_size", "f": "eps", "i": "whole_norm bf16 cache_type",
    })  # fmt: skip


class Sum(ctypes.Structure):
    """`Sum`."""

    _fields_: ClassVar = _fields({"p": "x residual out", "q": "rows width", "i": "bf16"})


class Gate(ctypes.Structure):
    """`Gate`."""

    _fields_: ClassVar = _fields({"p": "gate_up out", "q": "rows width", "i": "activation bf16"})


class Experts(ctypes.Structure):
    """`Experts`."""

    _fields_: ClassVar = [
        *_fields({"p": "x scores"}), ("gate_up", MatrixPointer), ("down", MatrixPointer),
        *_fields({
            "p": "gate_up_bias down_bias sorted gated fed out chosen place weights start active",
            "q": "rows count top_k", "i": "normalised", "f": "alpha limit",
        }),
    ]  # fmt: skip


class Attention(ctypes.Structure):
    """`Attention`."""

    _fields_: ClassVar = _fields({
        "p": "query k_cache v_cache out sinks block_table query_start kv_len",
        "q": "rows sequences table_width heads kv_heads head_dim block_size window", "f": "scale soft_cap",
        "i": "query_bf16 cache_type",
    })  # fmt: skip


class Operation(ctypes.Structure):
    """`Operation`: one recorded operation of a program."""

    _fields_: ClassVar = _fields({
        "i": "kind bf16 cache_type compressed activation whole_norm down_compressed normalised group",
        "f": "eps_or_scale soft_cap alpha limit",
        "p": "x residual weight bias out total k_cache v_cache cos_sin query_norm key_norm sinks down down_bias sorted "
        "gated fed routing",
        "q": "top_k experts width inputs outputs heads kv_heads head_dim rotary_dim block_size window",
    })  # fmt: skip


class Step(ctypes.Structure):
    """`Step`: what changes from one step of a program to the next. The second group of layers may be left out."""

    _fields_: ClassVar = [
        *_fields({
            "p": "token_ids positions query_start kv_len result finite", "q": "rows sequences table_width width",
            "i": "bf16",
        }),
        *_fields({"p": "slots block_table other_slots other_block_table"}),
    ]  # fmt: skip
