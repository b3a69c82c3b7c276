"""Makes empty weights, and says which tensor of a checkpoint belongs to which part of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..kernels.matrix import Matrix, new_matrix
from .tensor_copy import Place


class NewWeights:
    """Weights of one type on one device. On the "meta" device they cost nothing.

    `places` grows: name of each tensor in a checkpoint, to where it is to be copied.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.places: dict[str, Place] = {}
        self._dtype = dtype
        self._device = device

    def matrix(self, inputs: int, **parts: int) -> Matrix:
        """One matrix of several tensors stacked along its outputs: name to number of outputs."""
        whole = self.unplaced_matrix(sum(parts.values()), inputs)
        for name, view in zip(parts, torch.split(whole.plain, list(parts.values())), strict=True):
            self.places[name] = Place(view, tuple(view.shape))
        return whole

    def vector(self, **parts: int) -> torch.Tensor:
        """The same for vectors."""
        whole = self.unplaced_vector(sum(parts.values()))
        for name, view in zip(parts, torch.split(whole, list(parts.values())), strict=True):
            self.places[name] = Place(view, tuple(view.shape))
        return whole

    def float_vector(self, name: str, size: int) -> torch.Tensor:
        """A vector in float32, as its arithmetic is: so an offset can be added to a norm's without rounding."""
        whole = torch.empty(size, dtype=torch.float32, device=self._device)
        self.places[name] = Place(whole, (size,))
        return whole

    def module(
        self, prefix: str, outputs: Mapping[str, int], inputs: int, bias: bool
    ) -> tuple[Matrix, torch.Tensor | None]:
        """One matrix of several modules, and one vector of their biases if they have such."""
        weight = self.matrix(inputs, **{f"{prefix}{name}.weight": count for name, count in outputs.items()})
        return weight, self.vector(**{f"{prefix}{name}.bias": n for name, n in outputs.items()}) if bias else None

    def unplaced_matrix(self, outputs: int, inputs: int) -> Matrix:
        """A matrix for which `places` has nothing yet."""
        return new_matrix(outputs, inputs, self._dtype, self._device)

    def unplaced_vector(self, size: int) -> torch.Tensor:
        """The same for vectors."""
        return torch.empty(size, dtype=self._dtype, device=self._device)
