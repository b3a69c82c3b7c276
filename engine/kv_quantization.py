"""A checkpoint of which only the KV cache is meant to be quantised: what it says of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .errors import UnsupportedModelError

# What says nothing about weights; all the rest has to be empty.
_INERT = {
    "quant_method", "kv_cache_scheme", "format", "ignore", "quantization_status", "version", "global_compression_ratio",
}  # fmt: skip
# Of the scheme: what is known, with the values that our float8 caches have.
_SCHEME: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,), "type": ("float",), "strategy": ("tensor", "attn_head"), "symmetric": (True,),
    "dynamic": (False,), "observer": (), "observer_kwargs": (), "actorder": (None,), "group_size": (None,),
    "block_structure": (None,), "scale_dtype": (), "zp_dtype": (),
}  # fmt: skip


def is_cache_only(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a quantised KV cache beside whole weights.

    Raises UnsupportedModelError: it does, with something that is not known.
    """
    described: object = raw.get("quantization_config")
    if not isinstance(described, dict):
        return False
    said = cast("dict[str, Any]", described)
    if said.get("quant_method") != "compressed-tensors" or not isinstance(said.get("kv_cache_scheme"), dict):
        return False
    if any(value for key, value in said.items() if key not in _INERT):
        return False  # of weights, or of something else that nobody here knows
    for key, value in cast("dict[str, Any]", said["kv_cache_scheme"]).items():
        known = _SCHEME.get(key)
        if known is None or (known and value not in known):
            raise UnsupportedModelError(
                "quantization_config",
                f"config.json's quantization_config says {key} = {value!r} in kv_cache_scheme, which is not supported: "
                "float8 with one scale for a layer's keys or values, or one for each head, is.",
            )
    return True
