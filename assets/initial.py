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
    rows = torch.linalg.qr(torch.randn(size, count)).Q.T
    rows[:, 0] = 0.0
    return rows


@torch.no_grad()
def prepare(model: LlamaForCausalLM) -> None:
    """Sets the scale of the embeddings and builds the pair of heads."""
    config = model.config
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(0.0, EMBEDDING_SCALE)
    embeddings[:, 0] = CONSTANT_FEATURE
    model.model.norm.weight.fill_(FINAL_NORM)
    size = config.head_dim
    read, written, copied = (directions(size, config.hidden_size) for _ in range(3))
    look_back(model, read, written)
    look_up(model, read, written, copied)


def look_back(model: LlamaForCausalLM, read: torch.Tensor, written: torch.Tensor) -> None:
    """The first layer's first heads look one, two and three tokens back; the first of them notes what it saw."""
    config = model.config
    attention = model.model.layers[0].self_attn
    size, half = config.head_dim, config.head_dim // 2
    group = config.num_attention_heads // config.num_key_value_heads
    attention.q_proj.weight[: group * size] = 0.0
    attention.k_proj.weight[:size] = 0.0
    for pair in range(LOOK_BACK_PAIRS):
        angle = ROPE_BASE ** (-pair / half)
        attention.k_proj.weight[pair, 0] = LOOK_BACK_SCALE
        for head in range(group):
            # The rotary embedding turns this back to zero at the wanted distance, where the score is highest.
            turn = (head + 1) * angle
            attention.q_proj.weight[head * size + pair, 0] = LOOK_BACK_SCALE * math.cos(turn)
            attention.q_proj.weight[head * size + half + pair, 0] = -LOOK_BACK_SCALE * math.sin(turn)
    attention.v_proj.weight[:size] = read
    attention.o_proj.weight[:, :size] = written.T


def look_up(model: LlamaForCausalLM, read: torch.Tensor, written: torch.Tensor, copied: torch.Tensor) -> None:
    """The second layer's first heads look for what was noted about the current token, and copy what they find."""
    config = model.config
    attention = model.model.layers[1].self_attn
    size, half = config.head_dim, config.head_dim // 2
    group = config.num_attention_heads // config.num_key_value_heads
    # Only the slow half of the rotary pairs: the match must not depend on the distance.
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, size)])
    attention.k_proj.weight[:size] = 0.0
    attention.k_proj.weight[slow] = MATCH_SCALE * written[slow]
    attention.v_proj.weight[:size] = copied
    for head in range(group):
        rows = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[rows] = 0.0
        attention.q_proj.weight[head * size + slow] = MATCH_SCALE * read[slow]
        attention.o_proj.weight[:, rows] = copied.T / group
