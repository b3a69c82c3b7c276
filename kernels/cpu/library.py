"""The compiled library's functions, called with torch tensors.

Each method has the signature and the meaning of the reference that it names. ctypes lets other Python threads run
during a call.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import torch

from ..attention import Paging
from ..embedding import Asked, Scores
from ..forward import Begin, Describe
from ..kv_layout import cached_head_dim
from ..matrix import Matrix
from ..sample import SampleParameters
from .pointers import address, is_bf16, matrix_pointer, scores_call
from .program import Calls, cache_type, record
from .structs import Attention, Gate, MatrixPointer, Norm, Operation, Product, Rotation, ScoresCall, Step

_AT, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_POINTER = ctypes.POINTER
_SIGNATURES = {
    "headrace_norm": [_POINTER(Norm), _INT],
    "headrace_rotate_and_store": [_POINTER(Rotation), _INT],
    "headrace_silu_mul": [_POINTER(Gate), _INT],
    "headrace_paged_attention": [_POINTER(Attention), _INT],
    "headrace_pack": [_POINTER(MatrixPointer), _INT],
    "headrace_product": [_POINTER(Product), _INT, _INT],
    "headrace_rows": [_POINTER(MatrixPointer), _AT, _INT64, _AT, _INT],
    "headrace_scores": [_POINTER(ScoresCall), _INT],
    "headrace_begin": [_POINTER(Operation), _INT64, _POINTER(Step), _POINTER(ScoresCall), _INT],
    "headrace_finish": [_AT],
    "headrace_sample": [_AT] * 9 + [_INT64] * 2 + [_INT],
    "headrace_token_words": [_INT64] * 3 + [_AT, _INT64, _AT],
}


class CpuLibrary:
    """The library at `path`. Every tensor must be contiguous and on the CPU; activations float32 or bfloat16.

    Raises OSError where the file cannot be loaded. Methods raise TypeError for a tensor of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, _AT if name == "headrace_begin" else None

    def record(
        self, describe: Describe, cache: torch.Tensor, cos_sin: torch.Tensor, max_rows: int, dtype: torch.dtype
    ) -> Begin:
        """`program.record`."""
        calls = Calls(self._library.headrace_begin, self._library.headrace_finish)
        return record(calls, describe, cache, cos_sin, max_rows, dtype)

    def pack(self, matrix: Matrix) -> Matrix:
        """Bring a matrix into panels, where it lies: the argument is of no use afterwards."""
        self._library.headrace_pack(matrix_pointer(matrix), torch.get_num_threads())
        return replace(matrix, in_panels=True)

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`linear.linear`."""
        out = torch.empty((len(x), weight.outputs), dtype=x.dtype)
        self._library.headrace_product(self._product(x, weight, bias, out), 0, torch.get_num_threads())
        return out

    def linear_silu_mul(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`linear.linear`, then `silu_mul.silu_mul`; half of the outputs must be whole panels."""
        out = torch.empty((len(x), weight.outputs // 2), dtype=x.dtype)
        self._library.headrace_product(self._product(x, weight, bias, out), 1, torch.get_num_threads())
        return out

    def _product(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> Product:
        if not weight.in_panels or x.shape[1] != weight.inputs:
            raise TypeError(f"expected a matrix in panels with {x.shape[1]} inputs, got {weight.inputs}")
        return Product(address(x, weight.dtype), matrix_pointer(weight), address(bias, x.dtype), out.data_ptr(), len(x))

    def embedding(self, token_ids: torch.Tensor, table: Matrix) -> torch.Tensor:
        """`embedding.embedding`."""
        out = torch.empty((len(token_ids), table.inputs), dtype=table.dtype)
        self._library.headrace_rows(
            matrix_pointer(table), address(token_ids, torch.int64), len(token_ids), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def score(self, hidden: torch.Tensor, asked: Asked) -> Scores:
        """`embedding.score`."""
        call, made = scores_call(hidden, asked)
        self._library.headrace_scores(call, torch.get_num_threads())
        return made

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
        call = Norm(
            address(x, x.dtype), address(residual, x.dtype), address(weight, x.dtype), address(out, x.dtype), address(total, x.dtype),
            *x.shape, eps, is_bf16(x),
        )  # fmt: skip
        self._library.headrace_norm(call, torch.get_num_threads())

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
        kv_heads, head_dim = k_cache.shape[2], cached_head_dim(k_cache)
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        query = torch.empty((len(qkv), heads, head_dim), dtype=qkv.dtype)
        call = Rotation(
            address(qkv, qkv.dtype), address(positions, torch.int64), address(slots, torch.int64), address(cos_sin, torch.float32),
            address(k_cache, k_cache.dtype), address(v_cache, k_cache.dtype), query.data_ptr(),
            len(qkv), heads, kv_heads, head_dim, k_cache.shape[1], is_bf16(qkv), cache_type(k_cache),
        )  # fmt: skip
        self._library.headrace_rotate_and_store(call, torch.get_num_threads())
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
        call = Attention(
            address(query, query.dtype), address(k_cache, k_cache.dtype), address(v_cache, k_cache.dtype), out.data_ptr(),
            address(paging.block_table, torch.int32), address(paging.query_start, torch.int32), address(paging.kv_len, torch.int32),
            rows, len(paging.kv_len), paging.block_table.shape[1], heads, k_cache.shape[2], head_dim, k_cache.shape[1],
            window, scale, soft_cap, is_bf16(query), cache_type(k_cache),
        )  # fmt: skip
        self._library.headrace_paged_attention(call, torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu_mul.silu_mul`."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        call = Gate(address(gate_up, gate_up.dtype), out.data_ptr(), rows, width, is_bf16(gate_up))
        self._library.headrace_silu_mul(call, torch.get_num_threads())
        return out

    def sample(self, scores: torch.Tensor, parameters: SampleParameters) -> torch.Tensor:
        """`sample.sample`."""
        token_ids = torch.empty(len(scores), dtype=torch.int64)
        p = parameters
        self._library.headrace_sample(
            address(scores, torch.float32), address(p.temperature, torch.float32), address(p.top_k, torch.int32), address(p.top_p,
            torch.float32), address(p.min_p, torch.float32), address(p.seed, torch.int64), address(p.choice, torch.int64),
            address(p.position, torch.int64), token_ids.data_ptr(), len(scores), scores.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        return token_ids

    def token_words(self, seed: int, choice: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """`philox.token_words`."""
        words = torch.empty_like(token_ids)
        signed = ctypes.c_int64(seed & 0xFFFFFFFFFFFFFFFF).value
        self._library.headrace_token_words(
            signed, choice, position, address(token_ids, torch.int64), len(token_ids), words.data_ptr()
        )
        return words
