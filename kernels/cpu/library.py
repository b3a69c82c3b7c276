"""The compiled library's functions, called with torch tensors.

Each method has the signature and the meaning of the reference that it names. ctypes lets other Python threads run
during a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..attention import Paging
from ..embedding import Asked, Scores
from ..experts import Mixture
from ..forward import Begin, Describe
from ..gated import ACTIVATIONS, Activation
from ..kv_cache import KvCache
from ..kv_layout import cached_head_dim
from ..large_pages import zeros_in_large_pages
from ..matrix import Matrix
from ..rotary import QueryKeyNorm
from ..sample import SampleParameters
from .pointers import Scoring, check_experts, clamp_values, is_bf16, is_whole_norm, matrix_pointer, product_pointer
from .pointers import address as _at
from .program import Calls, record
from .recorder import cache_type
from .signatures import RESULTS, SIGNATURES
from .structs import Attention, Experts, Gate, Norm, Product, Rotation, Sum

SCREENED_OUTPUTS = 2048  # and more: with fewer, all scores are computed as fast


class CpuLibrary:
    """The library at `path`. Every tensor must be contiguous and on the CPU; activations float32 or bfloat16.

    Raises OSError where the file cannot be loaded. Methods raise TypeError for a tensor of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, RESULTS.get(name)

    def record(
        self,
        describe: Describe,
        cache: KvCache,
        tables: Sequence[torch.Tensor],
        max_rows: int,
        dtype: torch.dtype,
    ) -> Begin:
        """`program.record`."""
        calls = Calls(self._library.headrace_begin, self._library.headrace_finish)
        return record(calls, describe, cache, tables, max_rows, dtype)

    def pack(self, matrix: Matrix) -> Matrix:
        """Bring a matrix into panels, where it lies: the argument is of no use afterwards."""
        made = replace(matrix, in_panels=True)
        self._library.headrace_pack(matrix_pointer(made), torch.get_num_threads())
        return made

    def compressed(self, matrix: Matrix) -> Matrix:
        """Compress a matrix in panels, where it lies, if that can be and is worth it; it is for products alone then.

        The argument is of no use afterwards. Products give the same bits.
        """
        num_bytes = self._library.headrace_compress(matrix_pointer(matrix), torch.get_num_threads())
        if num_bytes == 0:
            return matrix
        return replace(matrix, values=matrix.values.view(torch.uint8).view(-1)[:num_bytes], compressed=True)

    def screen_bytes(self, outputs: int, inputs: int) -> int:
        """Memory of the copy that `screened` makes of a matrix; 0 where it makes none."""
        if outputs < SCREENED_OUTPUTS:
            return 0
        num_bytes: int = self._library.headrace_screen_bytes(outputs, inputs)
        return num_bytes

    def screened(self, matrix: Matrix) -> Matrix:
        """A matrix in panels with a copy in 8 bits, if it can have one: `score` finds the best with that, faster.

        The copy must be made anew when the matrix's values change.
        """
        num_bytes = self.screen_bytes(matrix.outputs, matrix.inputs)
        if not matrix.in_panels or num_bytes == 0:
            return matrix
        screen = zeros_in_large_pages((num_bytes,), torch.uint8)
        made = self._library.headrace_screen(matrix_pointer(matrix), screen.data_ptr(), torch.get_num_threads())
        return replace(matrix, screen=screen) if made else matrix

    def linear(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """`linear.linear`."""
        out = torch.empty((len(x), weight.outputs), dtype=x.dtype)
        self._library.headrace_product(self._product(x, weight, bias, out, scale), 0, torch.get_num_threads())
        return out

    def linear_gated(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """`linear.linear`, then `gated.silu_mul` or `gated.gelu_mul`; half of the outputs must be whole panels."""
        out = torch.empty((len(x), weight.outputs // 2), dtype=x.dtype)
        call = self._product(x, weight, bias, out)
        call.activation = ACTIVATIONS.index(activation)
        self._library.headrace_product(call, 1, torch.get_num_threads())
        return out

    def _product(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, out: torch.Tensor, scale: float = 1.0
    ) -> Product:
        if x.shape[1] != weight.inputs:
            raise TypeError(f"expected a matrix with {x.shape[1]} inputs, got {weight.inputs}")
        at = _at(x, weight.dtype)
        return Product(at, product_pointer(weight), _at(bias, x.dtype), out.data_ptr(), len(x), scale)

    def embedding(self, token_ids: torch.Tensor, table: Matrix, scale: float = 1.0) -> torch.Tensor:
        """`embedding.embedding`."""
        out = torch.empty((len(token_ids), table.inputs), dtype=table.dtype)
        self._library.headrace_rows(
            matrix_pointer(table),
            _at(token_ids, torch.int64),
            len(token_ids),
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def score(self, hidden: torch.Tensor, asked: Asked) -> Scores:
        """`embedding.score`."""
        call, made = Scoring(hidden, asked.output, len(asked.rows)).call(asked)
        self._library.headrace_scores(call, torch.get_num_threads())
        return made

    def cap_scores(self, scores: torch.Tensor, divisor: float, soft_cap: float) -> None:
        """`embedding.cap_scores`."""
        threads = torch.get_num_threads()
        self._library.headrace_cap_scores(_at(scores, torch.float32), *scores.shape, divisor, soft_cap, threads)

    def score_bounds(self, hidden: torch.Tensor, screened: Matrix) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the screen says that the scores of `hidden` [hidden] are not below and not above, float64 [vocab].

        For tests. None where it does not say.
        """
        asked = Asked(torch.zeros(1, dtype=torch.int64), screened, 1)  # must stay
        call, _ = Scoring(hidden[None], asked.output, 1).call(asked)
        least, most = torch.empty(2, screened.outputs)
        unit = self._library.headrace_score_bounds(call, least.data_ptr(), most.data_ptr())
        return (unit * least.double(), unit * most.double()) if unit else None

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
            _at(x, x.dtype), _at(residual, x.dtype), _at(weight, torch.float32), _at(out, x.dtype), _at(total, x.dtype),
            *x.shape, eps, is_bf16(x.dtype),
        )  # fmt: skip
        self._library.headrace_norm(call, torch.get_num_threads())

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`rms_norm.add`."""
        out = torch.empty_like(x)
        call = Sum(_at(x, x.dtype), _at(residual, x.dtype), out.data_ptr(), *x.shape, is_bf16(x.dtype))
        self._library.headrace_add(call, torch.get_num_threads())
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        norm: QueryKeyNorm | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`rotary.rotate_and_store`."""
        del kv_scales  # of caches that `cache_type` refuses
        kv_heads, head_dim = k_cache.shape[2], cached_head_dim(k_cache)
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        query = torch.empty((len(qkv), heads, head_dim), dtype=qkv.dtype)
        weights = (None, None) if norm is None else (norm.query, norm.key)
        whole = norm is not None and is_whole_norm(norm, heads, kv_heads, head_dim)
        call = Rotation(
            _at(qkv, qkv.dtype), _at(positions, torch.int64), _at(slots, torch.int64), _at(cos_sin, torch.float32),
            *(_at(weight, torch.float32) for weight in weights), _at(k_cache, k_cache.dtype),
            _at(v_cache, k_cache.dtype), query.data_ptr(), len(qkv), heads, kv_heads, head_dim,
            0 if cos_sin is None else cos_sin.shape[1], k_cache.shape[1], 0.0 if norm is None else norm.eps, whole,
            is_bf16(qkv.dtype), cache_type(k_cache),
        )  # fmt: skip
        self._library.headrace_rotate_and_store(call, torch.get_num_threads())
        return query

    def paged_attention(  # noqa: PLR0913, PLR0917  as the operation has them
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        paging: Paging,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attention.paged_attention`."""
        del kv_scales
        out = torch.empty_like(query)
        rows, heads, head_dim = query.shape
        call = Attention(
            _at(query, query.dtype), _at(k_cache, k_cache.dtype), _at(v_cache, k_cache.dtype), out.data_ptr(),
            _at(sinks, torch.float32),
            _at(paging.block_table, torch.int32), _at(paging.query_start, torch.int32), _at(paging.kv_len, torch.int32),
            rows, len(paging.kv_len), paging.block_table.shape[1], heads, k_cache.shape[2], head_dim, k_cache.shape[1],
            window, scale, soft_cap, is_bf16(query.dtype), cache_type(k_cache),
        )  # fmt: skip
        self._library.headrace_paged_attention(call, torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gated.silu_mul`."""
        return self._gated(gate_up, "silu")

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gated.gelu_mul`."""
        return self._gated(gate_up, "gelu")

    def _gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        number = ACTIVATIONS.index(activation)
        call = Gate(_at(gate_up, gate_up.dtype), out.data_ptr(), rows, width, number, is_bf16(gate_up.dtype))
        self._library.headrace_gate(call, torch.get_num_threads())
        return out

    def experts(self, x: torch.Tensor, scores: torch.Tensor, mixture: Mixture) -> torch.Tensor:
        """`experts.experts`; the width of an expert and of a row must be whole panels."""
        (rows, hidden), count, dtype, top_k = x.shape, scores.shape[1], x.dtype, mixture.top_k
        gate_up, down = mixture.gate_up, mixture.down
        biases = check_experts(mixture, count, hidden)
        out = torch.empty_like(x)
        rooms = [torch.empty((rows * top_k, width), dtype=dtype) for width in (hidden, down.inputs, hidden)]
        lists = [torch.empty(size, dtype=torch.int32) for size in (*[rows * top_k] * 3, count + 1, count)]
        call = Experts(
            _at(x, gate_up.dtype), _at(scores, dtype), product_pointer(gate_up), product_pointer(down), *biases,
            *(room.data_ptr() for room in rooms), out.data_ptr(), *(part.data_ptr() for part in lists), rows, count,
            top_k, mixture.normalised, *clamp_values(mixture),
        )  # fmt: skip
        self._library.headrace_experts(call, torch.get_num_threads())
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
