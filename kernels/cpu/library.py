"""The compiled library's functions, called with torch tensors.

Each method has the signature and the meaning of the reference that it names. ctypes lets other Python threads run
during a call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ..attention import Paging
from ..sample import SampleParameters

TYPES = (torch.float32, torch.bfloat16)
_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "headrace_paged_attention": [_POINTER] * 7 + [_INT64] * 8 + [_FLOAT] * 2 + [_INT] * 3,
    "headrace_rms_norm": [_POINTER] * 5 + [_INT64] * 2 + [_FLOAT] + [_INT] * 2,
    "headrace_rotate_and_store": [_POINTER] * 7 + [_INT64] * 4 + [_INT] * 3,
    "headrace_silu_mul": [_POINTER] * 2 + [_INT64] * 2 + [_INT] * 2,
    "headrace_sample": [_POINTER] * 9 + [_INT64] * 2 + [_INT],
    "headrace_token_words": [_INT64] * 3 + [_POINTER, _INT64, _POINTER],
}


class CpuLibrary:
    """The library at `path`. Every tensor must be contiguous and on the CPU; activations float32 or bfloat16.

    Raises OSError where the file cannot be loaded. Methods raise TypeError for a tensor of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`rms_norm.rms_norm`."""
        out = torch.empty_like(x)
        self._norm(x, None, weight, out, None, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm.add_rms_norm`."""
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(x, residual, weight, out, total, eps)
        return out, total

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor | None,
        eps: float,
    ) -> None:
        self._library.headrace_rms_norm(
            _at(x, x.dtype), _at(residual, x.dtype), _at(weight, x.dtype), _at(out, x.dtype), _at(total, x.dtype),
            x.shape[0], x.shape[1], eps, _is_bf16(x), torch.get_num_threads(),
        )  # fmt: skip

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """`rotary.rotate_and_store`."""
        kv_heads, head_dim = k_cache.shape[-2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        query = torch.empty((len(qkv), heads, head_dim), dtype=qkv.dtype)
        self._library.headrace_rotate_and_store(
            _at(qkv, qkv.dtype), _at(positions, torch.int64), _at(cos_sin, torch.float32), _at(k_cache, k_cache.dtype),
            _at(v_cache, k_cache.dtype), _at(slots, torch.int64), query.data_ptr(),
            len(qkv), heads, kv_heads, head_dim, _is_bf16(qkv), _is_bf16(k_cache), torch.get_num_threads(),
        )  # fmt: skip
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        paging: Paging,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> torch.Tensor:
        """`attention.paged_attention`."""
        out = torch.empty_like(query)
        rows, heads, head_dim = query.shape
        self._library.headrace_paged_attention(
            _at(query, query.dtype), _at(k_cache, k_cache.dtype), _at(v_cache, k_cache.dtype), out.data_ptr(),
            _at(paging.block_table, torch.int32), _at(paging.query_start, torch.int32), _at(paging.kv_len, torch.int32),
            rows, len(paging.kv_len), paging.block_table.shape[1], heads, k_cache.shape[2], head_dim, k_cache.shape[1],
            window, scale, soft_cap, _is_bf16(query), _is_bf16(k_cache), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu_mul.silu_mul`."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        self._library.headrace_silu_mul(
            _at(gate_up, gate_up.dtype), out.data_ptr(), rows, width, _is_bf16(gate_up), torch.get_num_threads()
        )
        return out

    def sample(self, scores: torch.Tensor, parameters: SampleParameters) -> torch.Tensor:
        """`sample.sample`."""
        token_ids = torch.empty(len(scores), dtype=torch.int64)
        p = parameters
        self._library.headrace_sample(
            _at(scores, torch.float32), _at(p.temperature, torch.float32), _at(p.top_k, torch.int32), _at(p.top_p,
            torch.float32), _at(p.min_p, torch.float32), _at(p.seed, torch.int64), _at(p.choice, torch.int64),
            _at(p.position, torch.int64), token_ids.data_ptr(), len(scores), scores.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        return token_ids

    def token_words(self, seed: int, choice: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """`philox.token_words`."""
        words = torch.empty_like(token_ids)
        signed = ctypes.c_int64(seed & 0xFFFFFFFFFFFFFFFF).value
        self._library.headrace_token_words(
            signed, choice, position, _at(token_ids, torch.int64), len(token_ids), words.data_ptr()
        )
        return words


def _at(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """The address of a tensor's data, after making sure that the C++ side may read it as it will."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise TypeError(
            f"expected a contiguous {dtype} tensor on the CPU, got a {layout} {tensor.dtype} on {tensor.device}"
        )
    return tensor.data_ptr()


def _is_bf16(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in TYPES:
        raise TypeError(f"the compiled CPU kernels know {TYPES[0]} and {TYPES[1]}, not {tensor.dtype}")
    return tensor.dtype == torch.bfloat16
