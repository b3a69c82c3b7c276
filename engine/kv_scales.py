"""What the values of a float8 KV cache are scaled by: read from the checkpoint, or found by trying.

A scale for each head of each layer's keys, and of its values: value = float8 · scale. One scale of 1 for all is what
makes models with large keys (Qwen2.5, whose keys have a bias) talk nonsense, so there is no default.

Calibration computes one made-up text with an exact cache and looks at the largest value of each head. HEADROOM is for
what that text does not show, and costs nothing: float8 has as many bits for small values as for large ones, over a
range of 28,672 in e4m3 without those below the normal ones. Scales are powers of two, so that another machine, which
computes the last bits otherwise, finds the same, and so that scaling rounds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ..kernels.attention import Paging
from ..kernels.kv_cache import Placement
from ..kernels.kv_layout import FLOAT8_LARGEST, KvLayout, by_position
from ..kernels.linear import padded_rows
from ..kernels.lists import bools
from .checkpoint import KV_SCALE, open_checkpoint, some
from .errors import WeightsError
from .kv_cache_memory import make_cache
from .passes import KvShape, Passes
from .tensor_copy import Place

HEADROOM = 4.0
TOKENS = 256  # of the text, or as many as the model can take
_SPREAD = 2654435761  # an odd number: multiples of it, modulo any vocabulary, look random
_BLOCK_SIZE = 16
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Text:
    """`kernels.forward.Inputs` of the text."""

    num_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    placements: tuple[Placement, ...]


def find_scales(
    model_dir: Path, passes: Passes, layout: KvLayout, dtype: torch.dtype, max_model_len: int
) -> torch.Tensor | None:
    """Give the scales of a cache of this type, float32 [layers, 2, kv_heads]; None where it needs none.

    layout  the backend's

    Raises:
        WeightsError: the checkpoint has scales for some layers only, or such as are no scales.
    """
    if dtype not in FLOAT8_LARGEST:
        return None
    if stored := _read(model_dir):
        logger.info("Scales of the KV cache: %d, from the checkpoint", len(stored))
        return stored_scales(stored, passes.kv).to(passes.device)
    found = calibrate(passes, layout, dtype, min(TOKENS, max_model_len))
    logger.info("Scales of the KV cache: from %g to %g, found by trying", float(found.min()), float(found.max()))
    return found


def _read(model_dir: Path) -> dict[str, torch.Tensor]:
    """The scales in a checkpoint, by name."""
    with open_checkpoint(model_dir) as checkpoint:
        found = {name: shape for name, shape in checkpoint.shapes.items() if KV_SCALE.fullmatch(name)}
        stored = {name: torch.empty(max(1, prod(shape))) for name, shape in found.items()}
        checkpoint.fill({name: Place(values, found[name]) for name, values in stored.items()})
    return stored


def stored_scales(stored: Mapping[str, torch.Tensor], kv: KvShape) -> torch.Tensor:
    """Sort the scales of a checkpoint, by name: each a number for a layer's keys or values, or one for each head.

    Raises WeightsError.
    """
    scales = torch.full((kv.num_layers, 2, kv.num_kv_heads), torch.nan)
    for name, tensor in stored.items():
        found = KV_SCALE.fullmatch(name)
        layer, kind = (int(found[1]), found[2] or found[3]) if found else (kv.num_layers, "")
        if layer >= kv.num_layers or tensor.numel() not in (1, kv.num_kv_heads):
            has = f"{kv.num_layers} layers with {kv.num_kv_heads} key-value heads"
            raise WeightsError(f"{name} {list(tensor.shape)} is no scale of {has}.", (name,))
        scales[layer, "kv".index(kind)] = tensor.float().flatten()
    usable = (scales.isfinite() & (scales > 0)).flatten(1).all(1)
    bad = [f"layer {layer}" for layer, is_usable in enumerate(bools(usable)) if not is_usable]
    if bad:
        raise WeightsError(
            f"The checkpoint's scales of the KV cache (k_scale, v_scale) are missing or not above 0: {some(bad)}; "
            "choose another kv_cache_dtype than float8.",
            tuple(stored),
        )
    return scales


def calibrate(passes: Passes, layout: KvLayout, dtype: torch.dtype, num_tokens: int) -> torch.Tensor:
    """Compute a text with an exact cache; give for each head the scale that its largest value asks for."""
    kv, rows = passes.kv, padded_rows(num_tokens, passes.row_multiple)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = make_cache(kv, num_blocks, num_blocks, _BLOCK_SIZE, passes.dtype, device=passes.device)
    passes.begin(cache, rows, num_tokens)(_text(passes, num_tokens, rows), None)()
    largest = torch.empty((kv.num_layers, 2, kv.num_kv_heads))
    for layer in range(kv.num_layers):
        for number, part in enumerate(cache.layer(layer)):
            values = by_position(part, layout, keys=number == 0).float()
            largest[layer, number] = values.abs().amax(dim=(0, 1, 3))
    return scales_for(largest, dtype).to(passes.device)


def scales_for(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Powers of two with which HEADROOM times the largest values still fit into a float8 type; 1 where all are 0."""
    needed = largest * (HEADROOM / FLOAT8_LARGEST[dtype])
    usable = needed.isfinite() & (needed > 0)
    return torch.where(usable, torch.exp2(torch.log2(needed).ceil()), 1.0)


def _text(passes: Passes, num_tokens: int, rows: int) -> _Text:
    """Tokens from all over the vocabulary, the same for every machine, as one sequence in the first blocks."""
    at = torch.arange(rows, device=passes.device)
    live = at < num_tokens
    ids = torch.where(live, (at + 1) * _SPREAD % passes.vocab_size, 0)
    table = torch.arange(-(-num_tokens // _BLOCK_SIZE), dtype=torch.int32, device=passes.device)[None]
    start = torch.tensor([0, num_tokens], dtype=torch.int32, device=passes.device)
    placement = Placement(torch.where(live, at, -1), Paging(table, start, start[1:], num_tokens))
    return _Text(rows, ids, torch.where(live, at, 0), (placement,) * len(passes.kv.kinds))
