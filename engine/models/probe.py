"""What an architecture's attention layers ask for, seen in one pass of a small copy that attends nowhere.

Windows are the whole model's own here: the functions that transformers makes masks from are asked what the last
positions of the longest text would see, and each layer's window must say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..passes import KvShape
from .attention_bridge import STEP, check_all_attend, refused

NAME = "headrace_probe"
FARTHEST = 1 << 20  # positions at most that a mask is asked about
_SEES = "headrace_sees"  # attribute of a mask: how many positions each query sees at most, 0 for all
_LONGEST = "headrace_longest"  # attribute of a configuration: positions of the longest text of the whole model


@dataclass(slots=True)
class Probe:
    """A `attention_bridge.Step` that notes what it is asked for."""

    farthest: int  # positions
    shapes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # kv_heads and head_dim of each layer

    def check_mask(self, mask: torch.Tensor | None, window: int) -> None:
        """Raise UnsupportedModelError unless transformers' own functions made the mask, and it is the window's."""
        sees = getattr(mask, _SEES, None)
        if sees is None:
            raise refused("attention_mask", "it makes a mask of its own")
        if sees != (window if window < self.farthest else 0):
            told, meant = (f"{n} positions" if n else "all positions" for n in (window, sees))
            raise refused("sliding_window", f"an attention layer is told to see {told} where its mask shows {meant}")

    def attend(
        self,
        module: torch.nn.Module,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Note the shapes; give the queries back."""
        del module, scale, window, soft_cap, sinks
        query, key, value = qkv
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise refused("kv_shape", f"its keys {list(key.shape)} and values {list(value.shape)} differ in shape")
        if key.shape[-1] % 2:
            raise refused("head_dim", f"its heads have {key.shape[-1]} values, an odd number")
        self.shapes.append((key.shape[1], key.shape[3]))
        return query[0].transpose(0, 1)


def described_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], config: Any, **kwargs: Any
) -> torch.Tensor:
    """Give a mask [1, 1, q_length, kv_length] that is only good for saying how far its queries see.

    Raises UnsupportedModelError where that is neither all positions before nor a fixed number of them.
    """
    del kwargs
    mask = torch.zeros((1, 1, q_length, kv_length), dtype=torch.bool)
    setattr(mask, _SEES, _sees(mask_function, farthest(config)))
    return mask


def of_length(config: Any, longest: int) -> Any:
    """A configuration whose masks are asked about texts of the whole model's length, which its own may be far below."""
    setattr(config, _LONGEST, longest)
    return config


def farthest(config: Any) -> int:
    """How many positions masks are asked about."""
    return min(getattr(config, _LONGEST) or 4096, FARTHEST)


def _sees(mask_function: Callable[..., torch.Tensor], length: int) -> int:
    """How many positions a query sees at most, its own included, or 0 for all, by what a few late ones see."""
    zero, keys = torch.tensor(0), torch.arange(length)
    counts: list[tuple[int, int]] = []  # position of a query, and how many it sees
    for at in sorted({length - 1, length - 2, length // 2 + 1, length // 2, length // 3} & set(range(length))):
        seen = mask_function(zero, zero, torch.tensor(at), keys).expand(length)
        count = int(seen.sum())
        if not bool(seen[at + 1 - count : at + 1].all()):
            raise refused("attention_mask", "its mask is neither causal nor a causal window")
        counts.append((at, count))
    window = counts[-1][1]
    if any(count != min(at + 1, window) for at, count in counts):
        raise refused("attention_mask", "its mask is neither causal nor a causal window")
    return 0 if window == length else window


def probed(base: Any, config: Any) -> KvShape:
    """Heads and head size of every layer's keys in a base model that was built with `NAME`.

    Raises:
        UnsupportedModelError: they differ, not every layer attends, or masks are not what the layers are told.
    """
    probe = Probe(farthest(config))
    ids = torch.arange(3)[None]
    packed: dict[str, Any] = {STEP: probe}
    base(input_ids=ids, position_ids=ids, use_cache=False, **packed)
    check_all_attend(len(probe.shapes), config.num_hidden_layers)
    if len(set(probe.shapes)) != 1:
        raise refused("kv_shape", f"its layers have keys of different shapes: {sorted(set(probe.shapes))}")
    return KvShape(len(probe.shapes), *probe.shapes[0])
