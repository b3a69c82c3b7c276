"""What the compiled library is told of tensors, after making sure that it may read them as it will."""

from __future__ import annotations

import torch

from ..embedding import Asked, Scores
from ..matrix import Matrix
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


def is_bf16(tensor: torch.Tensor) -> bool:
    """Whether a tensor is bfloat16 and not float32. Raises TypeError for another type."""
    if tensor.dtype not in TYPES:
        raise TypeError(f"the compiled CPU kernels know {TYPES[0]} and {TYPES[1]}, not {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def matrix_pointer(matrix: Matrix) -> MatrixPointer:
    """`Matrix`."""
    return MatrixPointer(address(matrix.values, matrix.dtype), matrix.outputs, matrix.inputs, is_bf16(matrix.values))


def scores_call(hidden: torch.Tensor, asked: Asked) -> tuple[ScoresCall, Scores]:
    """`Scores` of hidden states [any, inputs], and the tensors that it writes."""
    rows, num_best, output = asked.rows, asked.num_best, asked.output
    shape = (len(rows) - num_best, output.outputs)
    made = Scores(
        best=torch.empty(num_best, dtype=torch.int64),
        scores=torch.empty(shape, dtype=torch.float32) if asked.buffer is None else asked.buffer[: shape[0]],
        finite=torch.empty(len(rows), dtype=torch.bool),
    )
    call = ScoresCall(
        address(hidden, output.dtype), address(rows, torch.int64), len(rows), num_best, matrix_pointer(output),
        address(output.screen, torch.uint8), address(made.scores, torch.float32), made.best.data_ptr(),
        made.finite.data_ptr(),
    )  # fmt: skip
    return call, made
