"""Weight matrices: as a checkpoint has them, or in the panels that the compiled products read.

    plain       [outputs, inputs], one output after the other
    panels      PANEL outputs together: for each input (each pair of inputs in bfloat16) the values of all of them
    compressed  panels of bfloat16 in three quarters of their room, with every bit of theirs; see cpu/compressed.h

A panel takes the place of its outputs' rows, so a matrix is brought into panels where it lies, without a second copy,
and compressed there as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .large_pages import zeros_in_large_pages

PANEL = 64  # outputs; the compiled products have the same


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of a product or a table of embeddings. What holds it says whether it is in panels yet."""

    values: torch.Tensor  # [outputs, filled up to whole panels; inputs, in bfloat16 to pairs]; zero where filled up
    outputs: int
    inputs: int
    in_panels: bool = False
    compressed: bool = False  # panels, and `values` are the bytes of their form
    screen: torch.Tensor | None = None  # uint8: a copy in 8 bits to find the largest output with, see cpu/screen.cpp

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return torch.bfloat16 if self.compressed else self.values.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of the values, without what fills up the last panel unless it is compressed, and of the screen."""
        if self.compressed:
            return self.values.nbytes
        screen_bytes = 0 if self.screen is None else self.screen.nbytes
        return self.outputs * self.inputs * self.values.element_size() + screen_bytes

    @property
    def plain(self) -> torch.Tensor:
        """The matrix as [outputs, inputs]. Raises ValueError where it is in panels."""
        if self.in_panels:
            raise ValueError("the matrix is in panels: only the compiled products can read it")
        return self.values[: self.outputs, : self.inputs]


def new_matrix(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Matrix:
    """A matrix to be filled through `plain`, with room for whole panels; in large pages on the CPU."""
    together = max(1, 4 // dtype.itemsize)
    shape = (-(-outputs // PANEL) * PANEL, -(-inputs // together) * together)
    on_cpu = device.type == "cpu"
    values = zeros_in_large_pages(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
    return Matrix(values, outputs, inputs)


def plain_matrix(weight: torch.Tensor) -> Matrix:
    """A copy of `weight` [outputs, inputs] as a matrix."""
    outputs, inputs = weight.shape
    matrix = new_matrix(outputs, inputs, weight.dtype, weight.device)
    matrix.plain.copy_(weight)
    return matrix
