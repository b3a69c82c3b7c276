"""The weights the demo model's training starts from.

Repeating a name from a prompt takes a chain of two attention heads: one that tells each token what stood before it, and
one in a later layer that looks for a token which the current one stood before, and copies it. Neither helps without
the other, so training takes long to find the pair by chance, longer than this model's whole training. It is given a
rough pair from the start, and refines it. Everything else is random, as usual.
"""

# pyright: reportUnknownMemberType=false
# The libraries leave some signatures untyped.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

# Larger embeddings than usual, so that later layers can still read from the residual stream which token stands where;
# the final norm makes up for it, so that the first logits are small.
EMBEDDING_SCALE = 0.4
FINAL_NORM = 0.06
# One feature is the same in every token, so that a score can depend on the distance alone.
CONSTANT_FEATURE = 2.0
LOOK_BACK_PAIRS = 5
LOOK_BACK_SCALE = 1.4
MATCH_SCALE = 1.8
ROPE_BASE = 10000.0


def directions(count: int, size: int) -> torch.Tensor:
    """Random rows at right angles to each other, and without the constant feature."""
    rows = torch.Tensor(torch.linalg.qr(torch.randn(size, count))[0].T)  # pyright: ignore
    rows[:, 0] = 0.0
    return rows


class Heads(NamedTuple):
    """The attention weights of a layer, its head size, and how many heads share a key."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    size: int
    group: int


def heads_of(model: LlamaForCausalLM, layer: int) -> Heads:
    """The parts of a layer's attention that its first group of heads is built from."""
    query, key, value, output = (
        model.get_parameter(f"model.layers.{layer}.self_attn.{name}_proj.weight") for name in "qkvo"
    )
    size = model.config.head_dim or 0
    return Heads(query, key, value, output, size, len(query) // len(key))


@torch.no_grad()
def prepare(model: LlamaForCausalLM) -> None:
    """Sets the scale of the embeddings and builds the pair of heads."""
    embeddings = model.get_parameter("model.embed_tokens.weight")
    embeddings.normal_(0.0, EMBEDDING_SCALE)
    embeddings[:, 0] = CONSTANT_FEATURE
    model.get_parameter("model.norm.weight").fill_(FINAL_NORM)
    first, second = heads_of(model, 0), heads_of(model, 1)
    read, written, copied = (directions(first.size, embeddings.shape[1]) for _ in range(3))
    look_back(first, read, written)
    look_up(second, read, written, copied)


def look_back(heads: Heads, read: torch.Tensor, written: torch.Tensor) -> None:
    """The first layer's first heads look one, two and three tokens back; the first of them notes what it saw."""
    size, half = heads.size, heads.size // 2
    heads.query[: heads.group * size] = 0.0
    heads.key[:size] = 0.0
    for pair in range(LOOK_BACK_PAIRS):
        angle = ROPE_BASE ** (-pair / half)
        heads.key[pair, 0] = LOOK_BACK_SCALE
        for head in range(heads.group):
            # The rotary embedding turns this back to zero at the wanted distance, where the score is highest.
            turn = (head + 1) * angle
            heads.query[head * size + pair, 0] = LOOK_BACK_SCALE * math.cos(turn)
            heads.query[head * size + half + pair, 0] = -LOOK_BACK_SCALE * math.sin(turn)
    heads.value[:size] = read
    heads.output[:, :size] = written.T


def look_up(heads: Heads, read: torch.Tensor, written: torch.Tensor, copied: torch.Tensor) -> None:
    """The second layer's first heads look for what was noted about the current token, and copy what they find."""
    size, half = heads.size, heads.size // 2
    # Only the slow half of the rotary pairs: the match must not depend on the distance.
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, size)])
    heads.key[:size] = 0.0
    heads.key[slow] = MATCH_SCALE * written[slow]
    heads.value[:size] = copied
    for head in range(heads.group):
        rows = slice(head * size, (head + 1) * size)
        heads.query[rows] = 0.0
        heads.query[head * size + slow] = MATCH_SCALE * read[slow]
        heads.output[:, rows] = copied.T / heads.group
