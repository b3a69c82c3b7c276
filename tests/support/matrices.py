"""Rows of a weight matrix, whatever form it is in: for tests that spoil a model, and as the panels' plain reading."""

from __future__ import annotations

import torch

from headrace.kernels.backend import Backend
from headrace.kernels.matrix import PANEL, Matrix, plain_matrix


def row_view(matrix: Matrix, row: int) -> torch.Tensor:
    """The values of one output, [inputs / n, n], as a view that can be written."""
    if not matrix.in_panels:
        return matrix.values[row].view(-1, 1)
    together = 4 // matrix.values.element_size()
    panels = matrix.values.view(-1, matrix.values.shape[1] // together, PANEL, together)
    return panels[row // PANEL, :, row % PANEL]


def packed(ops: Backend, weight: torch.Tensor) -> Matrix:
    """A copy of `weight` [outputs, inputs] in the form that a backend's products read."""
    matrix = plain_matrix(weight)
    return matrix if ops.pack is None else ops.pack(matrix)


def as_plain(matrix: Matrix) -> torch.Tensor:
    """A copy of the matrix as [outputs, inputs]."""
    return torch.stack([row_view(matrix, row).flatten()[: matrix.inputs] for row in range(matrix.outputs)])
