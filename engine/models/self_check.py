"""Whether an architecture computes the same through the bridge as it does by itself: found out by trying, at load.

A small float32 copy of the architecture with random weights (`shrink`) scores two sequences: in chunks and token by
token, packed together, through the paged cache; and each alone, whole, with transformers' eager attention. Every
score must agree.

Tolerance: both compute in float32. A product over n ≤ 4,096 inputs loses up to sqrt(n) · 2⁻²⁴ ≤ 2⁻¹⁸ of its largest
partial sum, and the sixteen layers at most add up: 2⁻¹⁴ of the largest score. What a wrong mask changes is more than
a thousand times that, which is checked as well: scores whose context is another must differ by more than 2⁻⁷.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ...kernels.attention import Paging
from ...kernels.backend import Backend
from ...kernels.embedding import Asked
from ...kernels.kv_cache import Placement, one_group
from ...kernels.linear import padded_rows
from ..errors import UnsupportedModelError
from ..passes import KvShape
from . import probe
from .attention_bridge import NAME, refused, register
from .fallback import TransformersPasses, base_and_head
from .shrink import shrunk
from .transformers_config import TransformersConfig, also_not_native

TOLERANCE, AT_LEAST = 2.0**-14, 2.0**-7  # of the largest score
LENGTHS = (23, 17)  # tokens of the two sequences: several blocks and several windows
STEPS = ((9, 3), (1, 6), (8, 1), (1, 5), (3, 1), (1, 1))  # how many of each are computed together
BLOCK_SIZE, TABLES = 4, ((7, 2, 9, 0, 5, 11), (3, 10, 1, 8, 6))  # blocks of each, out of order
NUM_BLOCKS = 12
MOST_PARAMETERS = 1 << 27  # of the small copy, with its tables; a usual one has some millions
_SEED = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """`kernels.forward.Inputs` of one step of the check."""

    num_rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    placements: tuple[Placement]


def self_check(config: TransformersConfig, backend: Backend) -> KvShape:
    """Compare a small copy of an architecture with itself, and give the shape of the whole model's cache.

    Raises:
        UnsupportedModelError: it cannot be made small, refuses, or differs; the message says which.
    """
    register()
    register(probe.NAME, probe.described_mask)
    try:
        return _checked(config, backend)
    except UnsupportedModelError as error:
        raise refusal(config, error.feature, str(error)) from error
    except KeyError as error:
        why = (
            "it knows no attention but its own"
            if error.args[:1] in ((NAME,), (probe.NAME,))
            else f"its self-check lacks {error}"
        )
        raise refusal(config, "attention", why) from error
    except Exception as error:  # whatever it is, it comes from code that is not ours: nothing has been compared
        said = " ".join(str(error).split())[:200]
        raise refusal(config, "self_check", f"its self-check fails with {type(error).__name__}: {said}") from error


def refusal(config: TransformersConfig, feature: str, why: str) -> UnsupportedModelError:
    """Name the architecture and why it is refused, which `why` says in a clause."""
    message = f"The model's architecture ({config.architecture}) cannot run on the paged attention: {why}."
    return UnsupportedModelError(feature, also_not_native(message, config.not_native))


@torch.inference_mode()
def _checked(config: TransformersConfig, backend: Backend) -> KvShape:
    if config.num_heads == 0 or getattr(config.model_class, "_is_stateful", False):
        raise refused("state", "it keeps state of another kind than keys and values")
    small = type(config.raw)(**shrunk(config.raw))
    shape = _shape(config)
    eager, ours = _twins(config, small)
    sizes = replace(
        config, raw=small, vocab_size=small.vocab_size, hidden_size=small.hidden_size, num_layers=shape.num_layers
    )
    sequences = _sequences(small.vocab_size)
    want = [eager(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
    _check_context_matters(eager, sequences[0], want[0])
    got = _through_the_cache(TransformersPasses(sizes, ours, shape, backend), sequences)
    for scores, wanted in zip(got, want, strict=True):
        off = (scores - wanted).abs().max().item() / wanted.abs().max().item()
        if not off <= TOLERANCE:
            raise refused("self_check", f"its scores differ from transformers' own by {off:.1e} of the largest")
    if config.max_position == 0:
        raise refused("max_position_embeddings", "its configuration does not say how many positions it is made for")
    return KvShape(config.num_layers, _kv_heads(config, small, shape.num_kv_heads), shape.head_dim)


def _shape(config: TransformersConfig) -> KvShape:
    """Shape of the small model's cache, after a pass of it with the whole model's windows."""
    wide = probe.of_length(type(config.raw)(**shrunk(config.raw, keep_windows=True)), config.max_position)
    if (count := config.num_built(wide)) > MOST_PARAMETERS:
        raise refused("self_check", f"a small copy of it would still have {count / 1e6:.0f} million parameters")
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        base, _ = base_and_head(config.model_class._from_config(wide, attn_implementation=probe.NAME).float().eval())
    return probe.probed(base, wide)


def _twins(config: TransformersConfig, small: Any) -> tuple[Any, Any]:
    """The small model twice with the same weights: with transformers' eager attention, and with ours."""
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(_SEED)  # pyright: ignore[reportUnknownMemberType]
        eager = config.model_class._from_config(copy.deepcopy(small), attn_implementation="eager").float().eval()
        for name, parameter in eager.named_parameters():
            _draw(name, parameter)
        ours = config.model_class._from_config(copy.deepcopy(small), attn_implementation=NAME).float().eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def _draw(name: str, parameter: torch.Tensor) -> None:
    """Weights that make scores depend on the context, and that keep the size of what goes through them."""
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=0.5 if "emb" in name else 1.5 * parameter.shape[-1] ** -0.5)
    elif name.endswith("bias"):
        torch.nn.init.normal_(parameter, std=0.1)
    elif "norm" in name or "ln" in name:
        torch.nn.init.uniform_(parameter, 0.5, 1.5)


def _kv_heads(config: TransformersConfig, small: Any, seen: int) -> int:
    """Key-value heads of the whole model, by what the small one's were."""
    for name in ("num_key_value_heads", "num_attention_heads"):
        if getattr(small, name, None) == seen:
            return int(getattr(config.raw, name))
    if seen == 1:
        return 1
    raise refused("kv_shape", f"its {seen} key-value heads follow from nothing in the configuration")


def _sequences(vocab_size: int) -> list[torch.Tensor]:
    """Two sequences of random tokens, int64 [length]."""
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in LENGTHS]


def _check_context_matters(eager: Any, ids: torch.Tensor, scores: torch.Tensor) -> None:
    """Refuse where the comparison would say nothing: the last token's scores must depend on those before it."""
    other = torch.cat((ids[:-1].flip(0), ids[-1:]))
    changed = eager(input_ids=other[None], use_cache=False).logits[0, -1].float()
    if not (changed - scores[-1]).abs().max() > AT_LEAST * scores.abs().max():
        raise refused("self_check", "its scores hardly depend on the context, so that nothing can be compared")


def _through_the_cache(passes: TransformersPasses, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Scores of every position, [length, vocab] of each sequence, computed in steps on a cache of NaN."""
    kv = passes.kv
    cache = torch.full((kv.num_layers, 2, NUM_BLOCKS, BLOCK_SIZE, kv.num_kv_heads, kv.head_dim), float("nan"))
    begin = passes.begin(one_group(cache), padded_rows(sum(LENGTHS), passes.row_multiple), max(LENGTHS))
    done, got = [0] * len(sequences), [list[torch.Tensor]() for _ in sequences]
    for counts in STEPS:
        inputs = _rows(passes, sequences, done, counts)
        computed = begin(inputs, None)()
        scores = passes.score(computed.hidden, Asked(torch.arange(inputs.num_rows), passes.output)).scores
        for number, part in enumerate(torch.split(scores[: sum(counts)], list(counts))):
            got[number].append(part)
            done[number] += counts[number]
    return [torch.cat(parts) for parts in got]


def _rows(passes: TransformersPasses, sequences: list[torch.Tensor], done: list[int], counts: tuple[int, ...]) -> _Rows:
    """The next `counts` tokens of each sequence as one step, padded."""
    positions = [torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)]
    slots = [
        torch.tensor(table)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for table, at in zip(TABLES, positions, strict=True)
    ]
    tokens = [ids[at] for ids, at in zip(sequences, positions, strict=True)]
    rows = padded_rows(sum(counts), passes.row_multiple)
    padding = torch.zeros(rows - sum(counts), dtype=torch.int64)
    table = torch.zeros((len(TABLES), max(map(len, TABLES))), dtype=torch.int32)
    for number, blocks in enumerate(TABLES):
        table[number, : len(blocks)] = torch.tensor(blocks)
    start = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    kv_len = torch.tensor([at + count for at, count in zip(done, counts, strict=True)], dtype=torch.int32)
    placement = Placement(torch.cat((*slots, padding - 1)), Paging(table, start, kv_len))
    return _Rows(rows, torch.cat((*tokens, padding)), torch.cat((*positions, padding)), (placement,))
