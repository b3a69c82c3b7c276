"""The work is the same as ever, to the last token id: figures of different days and engines belong to one another."""

from __future__ import annotations

import pytest

from benchmarks.models import CHECKPOINTS
from benchmarks.workloads import END_ID, FIRST_ID, WORKLOADS, digest, uniform

DIGESTS = {
    "W1": "8ac152eb10cff1c14d3f47c5c09ed56dd1f15ddc3b74054dcfce0615fa03e725",
    "W2": "cc1bd1d02507be2d3165dad5bee33c549e1c105a9543920e13ae85dfa7d316d8",
    "W3": "1398b5967460bf88327884eccea18a2d43f29268775afe15cd2c086cbfb55abd",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_as_ever(name: str) -> None:
    assert digest(WORKLOADS[name].make()) == DIGESTS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_that_run_at_once_fit_into_the_blocks(name: str) -> None:
    """Or sequences would give way, and the figure would be that of another thing."""
    workload = WORKLOADS[name]
    longest = sorted((len(work.prompt) + work.num_out for work in workload.make()), reverse=True)
    needed = sum(-(-length // 16) for length in longest[: workload.max_num_seqs])
    assert needed <= workload.num_kv_blocks


def test_w3_shares_1536_tokens_and_no_more() -> None:
    prompts = [work.prompt for work in WORKLOADS["W3"].make()]
    assert {tuple(prompt[:1536]) for prompt in prompts} == {tuple(prompts[0][:1536])}
    assert len({prompt[1536] for prompt in prompts}) > len(prompts) // 2
    assert {len(prompt) for prompt in prompts} == {1600}


def test_ids_are_ordinary_tokens_of_the_models() -> None:
    ids = {token for work in uniform(4, 500, 1) for token in work.prompt}
    assert min(ids) >= FIRST_ID
    assert max(ids) < END_ID <= CHECKPOINTS["smol135"].vocab_size
