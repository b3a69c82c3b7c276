"""Pairs alternate, and their ratios are taken within each pair."""

from __future__ import annotations

import pytest

from benchmarks.pairs import Cost, alternate, compare, percentile, ratios, spread


def test_pairs_alternate_and_come_out_in_one_order() -> None:
    calls: list[str] = []

    def run(name: str) -> str:
        calls.append(name)
        return f"{name}{len(calls)}"

    assert alternate(lambda: run("a"), lambda: run("b"), 3) == [("a1", "b2"), ("a4", "b3"), ("a5", "b6")]
    assert "".join(calls) == "abbaab"


def test_a_ratio_is_of_one_pair_whatever_the_machine_did_between_pairs() -> None:
    """Twice as slow from the third pair on: the ratios do not see it, while a ratio of medians would."""
    found = ratios([(2.0, 4.0), (2.0, 4.0), (4.0, 8.0), (4.4, 8.0), (4.0, 8.0)])
    assert (found.median, found.low, found.high, found.count) == (0.5, 0.5, 0.55, 5)


def test_a_small_difference_is_quoted_in_cpu_seconds() -> None:
    small = compare([(Cost(1.05, 2.2), Cost(1.0, 2.0))])
    large = compare([(Cost(0.7, 2.2), Cost(1.0, 2.0))])
    assert (small.unit, small.quoted.median) == ("CPU seconds", 1.1)
    assert (large.unit, large.quoted.median) == ("seconds", 0.7)


def test_percentiles_lie_between_neighbours() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 1.0)] == [10.0, 25.0, 40.0]
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize("call", [lambda: spread([]), lambda: percentile([], 0.5), lambda: alternate(int, int, 0)])
def test_nothing_has_no_statistics(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"no values|at least one"):
        call()


def test_text_shows_the_spread_where_there_is_one() -> None:
    assert spread([1.0, 2.0, 4.0]).text(1) == "2.0 (1.0 … 4.0)"
    assert spread([2.0]).text(1) == "2.0"
