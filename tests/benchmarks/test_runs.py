"""The measuring scripts themselves, on a tiny checkpoint, and what they make of their readings."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks import leak, peers
from benchmarks.engine_run import EngineRun, run
from benchmarks.floor import Product, Products, make_products, replay
from benchmarks.leak import LeakRun, growth_bytes_per_step
from benchmarks.open_loop import poisson
from benchmarks.processes import RunError, fresh, last_json
from benchmarks.recorder import Mark
from benchmarks.scaling import exponents
from benchmarks.worker_probe import summary
from benchmarks.workloads import Work
from headrace.engine.config import read_model_config
from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import Shape, checkpoint
from tests.support.scripted import ScriptedRunner

FOLDER = Shape(vocab=49_152, hidden=16, heads=1, kv_heads=1, layers=1, middle=16, max_position=2048)


def test_engine_run_in_a_fresh_process() -> None:
    model = checkpoint(FOLDER)
    made = fresh(EngineRun, "benchmarks.engine_run", "W1", "--model", model, "--limit", 3, "--budget", 64)
    lengths = [(len(work.prompt), work.num_out) for work in _w1(3)]
    assert made.tokens_in == sum(num_in for num_in, _ in lengths)
    assert made.tokens_out == sum(num_out for _, num_out in lengths)
    assert made.steps == len(made.rows) == len(made.step_ms)
    # every prompt token and every output token but the last of each request is computed, once
    assert sum(computed for computed, _ in made.rows) == made.tokens_in + made.tokens_out - 3
    assert max(computed for computed, _ in made.rows) == 64
    assert sum(sampled for _, sampled in made.rows) == made.tokens_out
    assert 0 < sum(made.step_ms) / 1e3 <= made.wall_s
    assert made.cpu_s > 0


@pytest.mark.parametrize("kind", ["torch", "own"])
def test_the_floor_makes_the_products_of_the_model_at_the_rows_that_ran(kind: str) -> None:
    model = read_model_config(checkpoint(FOLDER))
    products = make_products(model, torch.bfloat16, kind)
    made: list[tuple[int, ...]] = []

    def noting(product: Product) -> Product:
        def make(x: torch.Tensor) -> torch.Tensor:
            result = product.make(x)
            made.append((len(x), x.shape[1], result.shape[1]))
            return result

        return Product(product.inputs, make)

    watched = Products([noting(each) for each in products.layers], noting(products.vocabulary), products.dtype)
    replay([(5, 0), (3, 2)], watched)
    layer = [(16, 48), (16, 16), (16, 32), (16, 16)]
    assert made == [(rows, *shape) for rows in (5, 3) for shape in layer] + [(2, 16, 49_152)]


def _w1(count: int) -> list[Work]:
    from benchmarks.workloads import WORKLOADS

    return WORKLOADS["W1"].make()[:count]


def test_first_tokens_of_w3_are_timed_one_after_the_other() -> None:
    runner = ScriptedRunner(vocab_size=49_152, num_blocks=600, max_model_len=2048)
    engine = Engine(runner, EngineConfig(max_num_seqs=8))
    work = [Work([7] * 160 + [number] * 4, 5) for number in range(6)]
    made = run(engine, "W3", work, "auto")
    assert len(made.first_token_s) == 4
    assert engine.stats().prefix_hits >= 9 * 160  # three of the first four, and all six afterwards


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(RunError, match=r"No module named benchmarks\.nothing"):
        fresh(EngineRun, "benchmarks.nothing")
    with pytest.raises(RunError, match="no result"):
        last_json("some words\n")


def test_arrivals_are_poisson_and_the_same_again() -> None:
    due = poisson(100.0, 50.0, 4, 2)
    assert due == poisson(100.0, 50.0, 4, 2)
    gaps = [b.at_s - a.at_s for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # 5,000 exponential gaps: their mean is known to 1.4 %, the ratio of deviation to mean to about 2 %; four of these
    assert mean == pytest.approx(0.01, rel=0.06)
    assert variance**0.5 / mean == pytest.approx(1.0, rel=0.08)


def test_host_cost_counts_what_lies_between_steps_at_full_batch() -> None:
    """Steps of 2 ms, 1 of it in the model; between them 1 ms on the wall and 0.5 of CPU."""
    full = [Mark(n * 2e-3, n * 1e-3, n * 2e-3 + 1e-3, n * 1e-3 + 0.5e-3, 4, 4) for n in range(20)]
    prefill = Mark(-1.0, -1.0, -0.5, -0.5, 40, 4)
    made = summary([prefill, *full], 4)
    assert made.host_cpu_us_per_token == pytest.approx(125)
    assert made.host_wall_us_per_token == pytest.approx(250)
    assert (made.step_ms, made.model_ms) == pytest.approx((2, 1))
    with pytest.raises(RunError, match="sequences that decode"):
        summary(full, 5)


def test_growth_is_seen_and_a_plateau_is_not() -> None:
    def grown(readings: list[float]) -> float:
        return growth_bytes_per_step(LeakRun(100_000, 1, 0, 0, 0, readings))

    warm_up = [50.0 + number for number in range(40)]
    assert grown([*warm_up, *[90.0] * 160]) == 0
    leaking = [*warm_up, *[90.0 + number * 500 * 64 / 2**20 for number in range(160)]]  # 64 bytes a step
    assert grown(leaking) == pytest.approx(64)
    assert leak.MOST_BYTES_PER_STEP < 64


def test_exponents() -> None:
    assert exponents((1, 2, 8), (3, 6, 96)) == pytest.approx([1, 2])


def test_peers_that_are_not_named_are_missing_and_wrong_names_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (peers.VLLM, peers.LLAMA, peers.LLAMA_MODEL):
        monkeypatch.delenv(name, raising=False)
    assert peers.missing() == [peers.VLLM_MISSING, peers.LLAMA_MISSING]
    monkeypatch.setenv(peers.VLLM, "/nowhere/python")
    with pytest.raises(FileNotFoundError, match=peers.VLLM):
        peers.vllm()
