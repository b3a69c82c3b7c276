"""Our paged attention as an attention function of transformers.

A model of transformers that is built with `attn_implementation=NAME` calls `attend` in each attention layer. All rows
of a step go through the model as one packed sequence [1, rows]; which sequence a row belongs to, and where its
keys and values lie, is in a `PagedStep` that travels with the call's keyword arguments. No mask is ever built.

Whatever an attention layer asks for that the kernels do not compute is refused by name: an argument that nobody here
knows may change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from ...kernels.attention import Paging
from ...kernels.backend import Backend
from ...kernels.kv_cache import KvCache
from ..errors import UnsupportedModelError

NAME = "headrace_paged"
STEP = "headrace_step"  # keyword argument under which the step travels
# What models hand on to their attention that cannot change what it computes: positions are applied before.
_INERT = {"position_ids", "cache_position", "return_dict"}
_INERT_IF_OFF = {"dropout", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}


@runtime_checkable
class Step(Protocol):
    """What attends in one pass. `attend` describes the arguments."""

    def check_mask(self, mask: torch.Tensor | None, window: int) -> None:
        """Raise UnsupportedModelError for a mask that would not be honoured."""
        ...

    def attend(
        self,
        module: torch.nn.Module,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Give [rows, heads, head_dim]; window and soft_cap are 0 where there is none; sinks float32 [heads]."""
        ...


@dataclass(slots=True)
class PagedStep:
    """One pass over a cache: where its rows belong, and which layers have attended so far."""

    backend: Backend
    cache: KvCache  # of one group
    paging: Paging
    slots: torch.Tensor  # int64 [rows]
    head_dim: int
    positions: torch.Tensor  # int64 [rows]
    called: list[torch.nn.Module] = field(default_factory=list[torch.nn.Module])

    def check_mask(self, mask: torch.Tensor | None, window: int) -> None:
        """Raise UnsupportedModelError for any mask."""
        del window
        if mask is not None:
            raise refused("attention_mask", "it makes a mask of its own")

    def attend(
        self,
        module: torch.nn.Module,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store the rows' keys and values in the next layer of the cache, and attend over it."""
        if any(module is earlier for earlier in self.called):
            raise refused("layers", "an attention layer is called twice in a pass")
        number, most = len(self.called), len(self.cache.places)
        if number == most:
            raise refused("layers", f"attention is called in more than {most} layers")
        (keys, values), scales = self.cache.layer(number), self.cache.layer_scales(number)
        self.called.append(module)
        rows = self._together(*qkv)
        at = self.positions, None, keys, values, self.slots
        query = self.backend.rotate_and_store(rows, *at, kv_scales=scales)
        return self.backend.paged_attention(query, keys, values, self.paging, scale, window, soft_cap, sinks, scales)

    def check_complete(self) -> None:
        """Raise UnsupportedModelError unless every layer has attended."""
        check_all_attend(len(self.called), len(self.cache.places))

    def _together(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values as [rows, (heads + 2·kv_heads)·head_dim], in this order."""
        rows, kv_heads, head_dim = len(self.slots), self.cache.kv_heads, self.head_dim
        if key.shape != (1, kv_heads, rows, head_dim) or value.shape != key.shape:
            raise refused(
                "kv_shape",
                f"a layer has keys {list(key.shape)} and values {list(value.shape)} where the cache is planned for "
                f"{[1, kv_heads, rows, head_dim]}",
            )
        if query.shape[0] != 1 or query.shape[2:] != (rows, head_dim) or query.shape[1] % kv_heads:
            raise refused("query_shape", f"a layer has queries {list(query.shape)} for {kv_heads} key-value heads")
        whole = torch.cat((query, key, value), dim=1)[0]
        return whole.transpose(0, 1).reshape(rows, -1).contiguous()


def check_all_attend(num_called: int, num_layers: int) -> None:
    """Raise UnsupportedModelError unless as many layers have attended as there are."""
    if num_called == 0:
        raise refused("attention", "it never calls the attention function that it is given")
    if num_called < num_layers:
        raise refused("state", f"{num_called} of {num_layers} layers attend, the others keep state of another kind")
    if num_called > num_layers:
        raise refused("layers", f"attention is called {num_called} times in {num_layers} layers")


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Build no mask: every row's keys follow from the step's paging and the layer's window."""
    del args, kwargs


def register(name: str = NAME, mask: Callable[..., torch.Tensor | None] = no_mask) -> None:
    """Make `attend` known to transformers by a name, with what makes its masks. Does no harm when repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    interfaces: tuple[Any, Any] = (AttentionInterface, AttentionMaskInterface)
    interfaces[0].register(name, attend)
    interfaces[1].register(name, mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, for transformers to call.

    query [1, heads, rows, head_dim]; key and value [1, kv_heads, rows, head_dim]; positions have been applied to them.
    Known among kwargs are `softcap`, `s_aux`, the sinks of the heads, and `sliding_window`, which counts the positions
    seen, the query's own included.
    Result: [1, rows, heads, head_dim] of query's dtype, and no weights.

    Raises:
        UnsupportedModelError: the layer asks for something that the kernels do not compute, or no step was handed on.
    """
    step = kwargs.pop(STEP, None)
    window, soft_cap = int(kwargs.pop("sliding_window", None) or 0), float(kwargs.pop("softcap", None) or 0.0)
    sinks: torch.Tensor | None = kwargs.pop("s_aux", None)
    if not isinstance(step, Step):
        raise refused("arguments", "its layers do not hand their arguments on to their attention")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise refused("is_causal", "its attention looks ahead")
    step.check_mask(attention_mask, window)
    for name, given in kwargs.items():
        if given is None or name in _INERT or (name in _INERT_IF_OFF and not given):
            continue
        raise refused(name, f"its attention is given {name}, which the paged attention does not know")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise refused("s_aux", f"its attention is given sinks {list(sinks.shape)} for {query.shape[1]} heads")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    sinks = None if sinks is None else sinks.float().contiguous()
    out = step.attend(module, (query, key, value), scale, window, soft_cap, sinks)
    return out.to(query.dtype).unsqueeze(0), None


def refused(feature: str, why: str) -> UnsupportedModelError:
    """An architecture that cannot run on the paged attention, and why in a clause."""
    return UnsupportedModelError(feature, why)
