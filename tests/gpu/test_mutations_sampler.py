"""Faults put into the kernels of the sampler: each turns a check red."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from headrace.kernels.gpu import cut as cut_module
from headrace.kernels.gpu import sample as sample_module
from tests.support.mutations import Fault, assert_found
from tests.support.sampler_checks import check_cuts, check_tokens, normal, parameters


def check_everything(sample: ModuleType, cut: ModuleType) -> None:
    """Small checks that see each of the faults below."""
    last = torch.full((2, 67), -9.0)
    last[:, [60, 66]] = torch.tensor([0.0, 1.0])
    check_tokens(last, parameters(2, temperature=0.0), sample)
    check_tokens(torch.zeros(1, 67), parameters(1, temperature=0.0), sample)
    check_tokens(normal(4, 90), parameters(4, temperature=[0.3, 3.0], choice=[0, 5], seed=2**40 + 1), sample)
    tied = torch.randint(0, 3, (2, 50), generator=torch.Generator().manual_seed(2)).float()
    check_cuts(tied, parameters(2, top_k=[3, 30], temperature=2.0), cut)
    check_cuts(normal(2, 50, 2), parameters(2, top_p=[0.5, 0.9], top_k=[0, 20], min_p=[0.0, 0.05]), cut)
    check_cuts(torch.zeros(1, 40), parameters(1, top_p=0.26), cut)
    flat = torch.zeros(1, 50)
    for k in (1, 2, 3):
        check_tokens(flat, parameters(1, top_k=k, position=[k]), sample)
    first = torch.full((8, 2100), -20.0)
    first[:, [5, 2048]] = torch.tensor([0.5, 0.0])
    check_tokens(first, parameters(8, top_k=1), sample)
    check_cuts(torch.zeros(1, 40), parameters(1, top_k=2, top_p=0.0), cut)
    two = torch.full((4, 2100), float("-inf"))
    two[:, [5, 2068]] = torch.tensor([0.0, 4.0])
    check_tokens(two, parameters(4, temperature=4.0, position=[0, 1, 2, 3]), sample)


LOADED = "return tl.load(scores + token, mask=token"
FAULTS = [
    Fault("sample", f"{LOADED} <", f"{LOADED} <="),
    Fault("sample", f"{LOADED} < VOCAB", f"{LOADED} < VOCAB - 1"),
    Fault("sample", "_four(p, q, r, s)", "_four(q, p, r, s)"),
    Fault("sample", "distance(anchor, x, temperature)", "distance(anchor, x, 1.0)"),
    Fault("sample", "distance(value_of(top), x, temperature)", "distance(value_of(top), x, 1.0)"),
    Fault("sample", "(high.to(tl.int64) << 32) | low.to(tl.int64)", "low.to(tl.int64)"),
    Fault("sample", 'tl.where(key == LOWEST, float("-inf"), x)', "x"),
    Fault("sample", "token <= last", "token < last"),
    Fault("philox", "lane == 0", "lane == 1"),
    Fault("philox", "tl.philox(seed, place, position, choice,", "tl.philox(seed, place, choice, position,"),
    Fault("order", " ^ LARGEST_ID", "", times=2),  # the higher id of equal ones
    Fault("cut", "bits[None, :] <= pivots[:, None]", "bits[None, :] < pivots[:, None]"),
    Fault("cut", "(mass >= target) & (count > 0)", "mass >= target"),
    Fault("cut", "kept = top_k", "kept = top_k + 1"),
    Fault("cut", "rank == n", "rank == n + 1"),
    Fault("cut", "tl.ceil(", "tl.floor("),
    Fault("cut", "kept - before", "kept"),
    Fault("cut", "if reach < limit:", "if reach > limit:"),
    Fault("packing", "words[:, 2] = top_p", "words[:, 2] = 0.9 * top_p"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault) -> None:
    assert_found(fault, check_everything, "sample", "cut")


def test_what_finds_the_faults_finds_none_in_the_kernels() -> None:
    check_everything(sample_module, cut_module)
