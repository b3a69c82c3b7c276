"""Loading takes hardly more memory than the checkpoint has, in a fresh process and in shards."""

from __future__ import annotations

from pathlib import Path

from benchmarks.load_memory import MOST_RATIO, SHAPES, measure


def test_the_peak_of_a_load_is_little_above_the_checkpoints_size(tmp_path: Path) -> None:
    run = measure("small", tmp_path)
    shape = SHAPES["small"]
    layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.middle + 2 * shape.hidden
    assert run.weights == 2 * (layer * shape.layers + 2 * shape.vocab * shape.hidden + shape.hidden)
    # at least what the weights take in the end: three quarters of them where they are compressed
    assert 0.7 < run.ratio <= MOST_RATIO, run
