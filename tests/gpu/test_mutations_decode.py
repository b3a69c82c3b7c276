"""Faults of the field put into the decode kernels, each of which the checks must find."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.support.attention_checks import decoded
from tests.support.mutations import Fault, assert_found, faulty
from tests.support.paged_cases import NOBODY, make_case, shared_prefix

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what faults make of numbers
SINKS = torch.tensor([0.5, -1.0, 2.0, 1.0])


def alone(decode: ModuleType) -> None:
    """A few small batches in which everything occurs once."""
    decoded(decode, make_case([(65, 1), (3, 2), (17, 1), (0, 1)], cached=torch.int8), sinks=SINKS)
    decoded(decode, make_case([(192, 1), (257, 1)], cached=torch.float8_e4m3fn, heads=6), 128, soft_cap=5.0)
    decoded(decode, make_case([(133, 1), (40, 1)], window=70), window=70, sinks=SINKS)  # 70 keys in three splits


def sharing(decode: ModuleType) -> None:
    """Tiles of shared blocks, of which only the first sequence's row of the table says where they are."""
    tiles = [((2, 1), 128), ((3,), 64)]
    case = make_case([(5, 2), (140, 1), (130, 1), (70, 1)], prefixes=tiles, cached=torch.float8_e4m3fn)
    case.paging.block_table[1, :8] = NOBODY
    decoded(decode, shared_prefix(case, tiles, per_tile=4))


FAULTS = [
    Fault("split_keys", "seen = key < end", "seen = key <= end", times=2),
    Fault("split_keys", "seen = key < end", "seen = key < end - 1", times=2),
    Fault("split_keys", "seen &= key >= first", "seen &= key > first", times=2),
    Fault("split_keys", "seen &= key >= first", "seen &= key >= 0", times=2),
    Fault("split_keys", "first // TILE * TILE)", "first // TILE * TILE + TILE)"),
    Fault("split_keys", "tl.maximum(length - WINDOW, 0)", "tl.maximum(length - WINDOW - 1, 0)"),
    Fault("split_keys", "tl.maximum(length - WINDOW, 0)", "tl.maximum(length - WINDOW + 1, 0)"),
    Fault("split_keys", "mask=following < end", "mask=following < end + TILE"),
    Fault("split_keys", "score *= k_scale[None, :]", "score *= 1.0"),
    Fault("split_keys", "weight *= v_scale[None, :]", "weight *= 1.0"),
    Fault("split_keys", "block * (STRIDE // 4) + VECTORS // 4", "block * (STRIDE // 4) + VECTORS // 4 + 1"),
    Fault("split_keys", "kv_head * BLOCK_SIZE + key % BLOCK_SIZE", "key % BLOCK_SIZE * KV_HEADS + kv_head"),
    Fault("split_keys", "block * STRIDE +", "block * VECTORS +"),
    Fault("split_keys", "acc *= rescale[:, None]", "acc *= 1.0"),
    Fault("split_keys", "queries == 1", "queries >= 1"),
    Fault("split_keys", "tl.cdiv(length, SPLIT)", "length // SPLIT"),
    Fault("split_keys", "tl.cdiv(length, SPLIT)", "length // SPLIT + 1"),
    Fault("split_keys", "SOFT_CAP - 2.0 * SOFT_CAP", "SOFT_CAP - 1.0 * SOFT_CAP"),
    Fault("decode", "scale *= tl.load(kv_scales + kv_head)", "scale *= 1.0"),
    Fault("decode", "factor *= tl.load(kv_scales + KV_HEADS + kv_head)", "factor *= tl.load(kv_scales + kv_head)"),
    Fault("decode", "tl.where(is_only, tl.exp2", "tl.where(is_only & (split > 0), tl.exp2"),
    Fault("decode", "tl.where(is_only, tl.exp2", "tl.where(split >= 0, tl.exp2"),
    Fault("decode", "kv_head * GROUP + in_group", "in_group * KV_HEADS + kv_head"),
    Fault("decode", "split += tl.load(own_from + seq) // SPLIT", "split += tl.load(own_from + seq) // SPLIT + 1"),
    Fault("decode", "top + tl.log2(total)", "top"),
    Fault("decode", "(window + scratch.split - 2) // scratch.split + 1", "window // scratch.split + 1"),
    Fault("merge", "total += tl.exp2(tl.load(sinks + head) * _LOG2_E - top)", "total += 0.0"),
    Fault("merge", "to_split - from_split <= 1", "to_split - from_split <= 0"),
    Fault("merge", "is_live = split < to_split", "is_live = split <= to_split"),
    Fault("merge", "is_live = split < to_split", "is_live = split < to_split - 1"),
    Fault("shared_prefix", "source = tl.load(seqs + tile * PER_TILE)", "source = tl.load(seqs + tile * PER_TILE + 1)"),
    Fault("shared_prefix", "source = tl.load(seqs + tile * PER_TILE)", "source = tl.load(seqs)"),
    Fault("shared_prefix", "number // GROUP, mask", "number % PER_TILE, mask"),
    Fault("shared_prefix", "seqs + tile * PER_TILE + number", "seqs + number"),
    Fault("shared_prefix", "split * SPLIT >= tl.load(tile_len + tile)", "split * SPLIT > tl.load(tile_len + tile)"),
    Fault("shared_prefix", "split * SPLIT >= tl.load(tile_len + tile)", "split > 0"),
    Fault("shared_prefix", "is_live = split < to_split", "is_live = seq >= -1"),
    Fault("shared_prefix", "kv_head * GROUP + number % GROUP", "number % GROUP * KV_HEADS + kv_head"),
    Fault("shared_prefix", "at = row * QUERY_ROW", "at = seq * QUERY_ROW"),
    Fault("shared_prefix", "scale *= tl.load(kv_scales + kv_head)", "scale *= tl.load(kv_scales)"),
    Fault(
        "shared_prefix", "factor *= tl.load(kv_scales + KV_HEADS + kv_head)", "factor *= tl.load(kv_scales + kv_head)"
    ),
    Fault("shared_prefix", "split * SPLIT + SPLIT, 0", "split * SPLIT + SPLIT - 1, 0"),
    Fault("shared_prefix", "* SPLITS + split", "* SPLITS"),
    Fault("shared_prefix", "top + tl.log2(total)", "tl.log2(total)"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault) -> None:
    by_sharing = fault.module == "shared_prefix" or "own_from" in fault.before
    assert_found(fault, sharing if by_sharing else alone, "decode")


def test_the_checks_pass_where_nothing_is_changed() -> None:
    with faulty(Fault("split_keys", "import torch", "import  torch"), "decode") as loaded:
        alone(*loaded)
        sharing(*loaded)
