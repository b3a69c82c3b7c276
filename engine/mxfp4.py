"""Weights in 4 bits, of which every 32 share a scale: what a checkpoint says of them, and what they are.

A value is a sign, two bits of exponent and one of mantissa, two values in a byte, the first in its lower half; a scale
is a power of two, stored as its exponent plus 127. Source:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from .errors import UnsupportedModelError

GROUP = 32  # values that share a scale
GROUP_BYTES = GROUP // 2
# What the published files name as kept whole; all of it is whole wherever only the experts are in 4 bits.
_WHOLE = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_mxfp4(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration speaks of weights in this form."""
    described: object = raw.get("quantization_config")
    return isinstance(described, dict) and cast("dict[str, Any]", described).get("quant_method") == "mxfp4"


def check_quantization(described: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for what a quantization_config says beyond "the experts are in this form"."""
    for key, value in described.items():
        if key in ("quant_method", "dequantize"):
            continue
        if key != "modules_to_not_convert":
            raise _refused(f"has {key!r}, which is not known")
        others = cast("list[object]", value if isinstance(value, list) else [] if value is None else [value])
        if unknown := [name for name in others if name not in _WHOLE]:
            raise _refused(
                f"names {unknown[0]!r} under modules_to_not_convert, and only {', '.join(_WHOLE)} may stand there"
            )


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError("quantization_config", f"config.json's quantization_config {what}.")


def dequantised(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Give the values of groups: packed uint8 [groups, 16], scales uint8 [groups]; float32 [groups, 32].

    bfloat16 holds all of them exactly as well, but those of the largest scales.
    """
    doubled = _DOUBLED_PAIRS.index_select(0, packed.reshape(-1).int()).view(len(packed), GROUP)
    return doubled.mul_(_HALVED_POWERS.index_select(0, scales.int()).unsqueeze(1))


def _doubled_pairs() -> torch.Tensor:
    of_bits = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)]) * 2.0
    byte = torch.arange(256)
    return torch.stack((of_bits[byte & 15], of_bits[byte >> 4]), dim=1)


_DOUBLED_PAIRS = _doubled_pairs()  # float32 [256, 2]: the values of each byte, twice as large
_HALVED_POWERS = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])  # the last one doubled is too large
