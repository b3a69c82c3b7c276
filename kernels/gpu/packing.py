"""What a draw needs, as a GPU reads it: one small table, made on the host and copied once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..sample import SampleParameters

WORDS = 8  # int32 of a row: temperature, top_k, top_p, reach, seed (low, high), choice, position; floats as their bits
NEVER = 2**31 - 1  # the reach of a row that no min_p bounds: above the bits of every float


@dataclass(frozen=True, slots=True)
class PackedParameters:
    """`SampleParameters` of some rows; the flags say what the host knows, so that no launch is made for nothing."""

    words: torch.Tensor  # int32 [rows, WORDS], on the device of the scores
    draws: bool  # whether any row's temperature is above 0
    cuts: bool  # whether any row that draws has a top_k, top_p or min_p

    def to(self, device: torch.device) -> PackedParameters:
        """Copy to a device, from pinned memory without waiting for it."""
        words = self.words.pin_memory() if device.type == "cuda" else self.words
        return PackedParameters(words.to(device, non_blocking=True), self.draws, self.cuts)


def pack(parameters: SampleParameters) -> PackedParameters:
    """Pack parameters that lie on the CPU."""
    rows = len(parameters.temperature)
    words = np.empty((rows, WORDS), np.int32)
    temperature, top_p = parameters.temperature.numpy(), parameters.top_p.numpy()
    top_k, min_p = parameters.top_k.numpy(), parameters.min_p.numpy()
    words[:, 0] = temperature.view(np.int32)
    words[:, 1] = top_k
    words[:, 2] = top_p.view(np.int32)
    words[:, 3] = NEVER if not min_p.any() else _reach(min_p)
    words[:, 4:6] = np.ascontiguousarray(parameters.seed.numpy()).view(np.int32).reshape(rows, 2)
    words[:, 6] = parameters.choice.numpy().astype(np.int32)  # the low half
    words[:, 7] = parameters.position.numpy().astype(np.int32)
    drawn = temperature > 0
    cuts = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return PackedParameters(torch.from_numpy(words), bool(drawn.any()), bool(cuts.any()))


def _reach(min_p: np.ndarray) -> np.ndarray:
    """Give the bits of the largest float32 distance d below the best score with exp(-d) ≥ min_p, in float64.

    The best itself, d = 0, is within reach of everything.
    """
    wanted = min_p.astype(np.float64)
    with np.errstate(divide="ignore"):
        reach = np.maximum(-np.log(wanted), 2.0**-54).astype(np.float32)  # exp(-2⁻⁵⁴) is 1
    reach = np.nextafter(reach, np.float32(np.inf))
    for _ in range(2):  # one step too far, and half a step of rounding
        beyond = (np.exp(-reach.astype(np.float64)) < wanted) & (reach > 0)
        reach = np.where(beyond, np.nextafter(reach, np.float32(0)), reach)
    return np.where(min_p > 0, reach.view(np.int32), NEVER)
