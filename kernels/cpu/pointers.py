"""What the compiled library is told of tensors, after making sure that it may read them as it will."""

from __future__ import annotations

import torch

from ..embedding import Asked, Scores
from ..experts import Mixture
from ..matrix import PANEL, Matrix
from ..rotary import QueryKeyNorm
from .structs import MatrixPointer, ScoresCall

TYPES = (torch.float32, torch.bfloat16)


def address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """The address of a tensor's data. Raises TypeError for one that is not contiguous, of `dtype`, on the CPU."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise TypeError(
            f"expected a contiguous {dtype} tensor on the CPU, got a {layout} {tensor.dtype} on {tensor.device}"
        )
    return tensor.data_ptr()


def is_bf16(dtype: torch.dtype) -> bool:
    """Whether it is bfloat16 and not float32. Raises TypeError for another type."""
    if dtype not in TYPES:
        raise TypeError(f"the compiled CPU kernels know {TYPES[0]} and {TYPES[1]}, not {dtype}")
    return dtype == torch.bfloat16


def is_whole_norm(norm: QueryKeyNorm, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether a norm is of all heads together and not of each. Raises TypeError for weights of any other length."""
    lengths = len(norm.query), len(norm.key)
    if lengths == (head_dim, head_dim):
        return False
    if lengths != (heads * head_dim, kv_heads * head_dim):
        raise TypeError(f"expected norms of a head's {head_dim} values or of all heads', got {lengths}")
    return True


def check_experts(mixture: Mixture, count: int, hidden: int) -> tuple[int | None, int | None]:
    """Give the addresses of both biases.

    Raises TypeError unless the parts of `count` experts fit each other and each expert's are whole panels.
    """
    gate_up, down = mixture.gate_up, mixture.down
    width = down.inputs
    shapes = (gate_up.outputs, gate_up.inputs, down.outputs)
    if shapes != (2 * count * width, hidden, count * hidden) or width % PANEL or hidden % PANEL:
        raise TypeError(
            f"expected {count} experts between {hidden} and {width} values, multiples of {PANEL}; got {shapes}"
        )
    biases = ((mixture.gate_up_bias, gate_up), (mixture.down_bias, down))
    if any(bias is not None and bias.shape != (matrix.outputs,) for bias, matrix in biases):
        raise TypeError(f"expected biases of {gate_up.outputs} and {down.outputs} values")
    return address(mixture.gate_up_bias, gate_up.dtype), address(mixture.down_bias, down.dtype)


def clamp_values(mixture: Mixture) -> tuple[float, float]:
    """`alpha` and `limit` of a mixture; the latter is 0 where nothing is clamped."""
    return (0.0, 0.0) if mixture.clamp is None else (mixture.clamp.alpha, mixture.clamp.limit)


def matrix_pointer(matrix: Matrix) -> MatrixPointer:
    """`Matrix` in whole panels. Raises TypeError for a compressed one: only products read these."""
    if matrix.compressed:
        raise TypeError("expected a matrix in whole panels, got a compressed one")
    return product_pointer(matrix)


def product_pointer(matrix: Matrix) -> MatrixPointer:
    """`Matrix` in either form. Raises TypeError for one that is not in panels."""
    if not matrix.in_panels:
        raise TypeError("expected a matrix in panels, got a plain one")
    at = address(matrix.values, matrix.values.dtype)
    return MatrixPointer(at, matrix.outputs, matrix.inputs, is_bf16(matrix.dtype), matrix.compressed)


class Scoring:
    """Scores of hidden states [any, inputs] by `output`, for at most `max_rows` of them at a time.

    What a call writes is valid until the next one.
    """

    def __init__(self, hidden: torch.Tensor, output: Matrix, max_rows: int) -> None:
        self.output = output
        self._hidden = hidden
        self._hidden_at = address(hidden, output.dtype)
        self._matrix = matrix_pointer(output)
        self._screen_at = address(output.screen, torch.uint8)
        self._best = torch.empty(max_rows, dtype=torch.int64)
        self._finite = torch.empty(max_rows, dtype=torch.bool)

    def call(self, asked: Asked) -> tuple[ScoresCall, Scores]:
        """`Scores`, and the tensors that it writes. Raises ValueError for more rows than there is room for."""
        num_rows, num_best, buffer = len(asked.rows), asked.num_best, asked.buffer
        if num_rows > len(self._best):
            raise ValueError(f"{num_rows} rows ask for scores, and there is room for {len(self._best)}")
        if buffer is None:
            buffer = torch.empty((num_rows - num_best, self.output.outputs), dtype=torch.float32)
        made = Scores(self._best[:num_best], buffer[: num_rows - num_best], self._finite[:num_rows])
        call = ScoresCall(
            self._hidden_at, address(asked.rows, torch.int64), num_rows, num_best, self._matrix, self._screen_at,
            address(buffer, torch.float32), self._best.data_ptr(), self._finite.data_ptr(),
        )  # fmt: skip
        return call, made
