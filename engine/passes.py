"""What a runner needs of a model, and the native decoder as one.

model    token ids and a cache → hidden states [rows, hidden] → scores [rows that were asked for, vocab]
         decoder (here)     our operations, recorded or one by one
         fallback           transformers' own code around our attention, see `models.fallback`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..kernels.backend import Backend
from ..kernels.embedding import Asked, Scores
from ..kernels.forward import Begin, immediately
from ..kernels.kv_cache import KvCache
from ..kernels.matrix import Matrix
from .config import ModelConfig
from .models.decoder import Decoder
from .models.rotary import rotary_table
from .weights import DecoderWeights


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position takes in the cache: in each layer a key and a value for each of the heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    # Of each layer: positions that a query sees, its own included; 0: all. Empty: every layer sees all.
    windows: tuple[int, ...] = ()

    @property
    def window(self) -> int:
        """The largest window; 0: no layer has one."""
        return max(self.windows, default=0)

    @property
    def num_windowed(self) -> int:
        """Number of layers with a window."""
        return sum(window > 0 for window in self.windows)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of each group of layers that share their blocks: whether they have a window."""
        return tuple(sorted({window > 0 for window in self.windows})) or (False,)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of each layer: its group, and its number there."""
        groups = [self.kinds.index(window > 0) for window in self.windows] or [0] * self.num_layers
        return [(group, groups[:layer].count(group)) for layer, group in enumerate(groups)]


class Passes(Protocol):
    """A model with its weights. Used by one thread at a time."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that are scored."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def kv(self) -> KvShape:
        """Shape of the cache that `begin` wants."""
        ...

    @property
    def row_multiple(self) -> int:
        """What the rows of a step, and those to be scored, are padded to."""
        ...

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share a key-value head."""
        ...

    @property
    def output(self) -> Matrix:
        """The output matrix [vocab, hidden], which `Asked` names."""
        ...

    def begin(self, cache: KvCache, max_rows: int, max_model_len: int) -> Begin:
        """Prepare passes over `cache`, which is as `kv` says, of up to `max_rows` rows."""
        ...

    def score(self, hidden: torch.Tensor, asked: Asked) -> Scores:
        """Score the vocabulary for rows of hidden states; see `kernels.embedding.score`."""
        ...

    def final(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores, float32 [any, vocab], of a step or of `score`, as the model gives them; perhaps in place.

        What is best stays so: who only wants that skips it.
        """
        ...


def kv_shape(config: ModelConfig) -> KvShape:
    """Shape of the native decoder's cache."""
    windows = tuple(layer.window for layer in config.layers)
    return KvShape(config.num_layers, config.num_kv_heads, config.head_dim, windows)


class DecoderPasses:
    """`Passes` of the native decoder; see `Passes` for the fields."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.values.device
        self.kv = kv_shape(config)
        self.row_multiple = backend.row_multiple(weights.layers[0].qkv)
        self.queries_per_kv_head = config.num_heads // config.num_kv_heads
        self.output = weights.output

    def begin(self, cache: KvCache, max_rows: int, max_model_len: int) -> Begin:
        """See `Passes`."""
        config = self.config
        tables = [rotary_table(rope, config.head_dim, max_model_len).to(self.device) for rope in config.ropes]
        describe = Decoder(config, self.weights).describe
        if self.backend.record is None:
            return immediately(self.backend, describe, cache, tables)
        return self.backend.record(describe, cache, tables, max_rows, self.dtype)

    def score(self, hidden: torch.Tensor, asked: Asked) -> Scores:
        """See `Passes`."""
        return self.backend.score(hidden, asked)

    def final(self, scores: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        caps = (self.config.logits_divisor, self.config.logits_soft_cap)
        if caps != (1.0, 0.0):
            self.backend.cap_scores(scores, *caps)
        return scores
