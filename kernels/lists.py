"""Tensors as Python lists, with the types that torch leaves open."""

from __future__ import annotations

from typing import Any

import torch


def ints(tensor: torch.Tensor) -> list[int]:
    """Give the elements of a vector of integers."""
    untyped: Any = tensor
    return untyped.tolist()


def floats(tensor: torch.Tensor) -> list[float]:
    """Give the elements of a vector of numbers."""
    untyped: Any = tensor
    return untyped.tolist()


def bools(tensor: torch.Tensor) -> list[bool]:
    """Give the elements of a vector of truth values."""
    untyped: Any = tensor
    return untyped.tolist()
