"""The screen in front of greedy scoring: it may only change how fast the best are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.kernels.backend import open_library
from headrace.kernels.cpu import library as cpu_library
from headrace.kernels.cpu.library import CpuLibrary
from headrace.kernels.embedding import Asked
from headrace.kernels.matrix import PANEL, Matrix, plain_matrix

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> CpuLibrary:
    """The compiled library, which makes a screen however small a matrix is."""
    found = open_library()
    if not isinstance(found, CpuLibrary):
        pytest.skip(f"no compiled kernels here: {found}")
    monkeypatch.setattr(cpu_library, "SCREENED_OUTPUTS", 1)
    if found.screen_bytes(64, 4) == 0:
        pytest.skip("no screen on this kind of CPU")
    return found


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Draw:
    """Random numbers, and matrices and rows of the kinds that are hard to screen."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=self.generator)

    def number(self, limit: int) -> int:
        return int(self.below(limit, 1))

    def weight(self, kind: str, outputs: int, inputs: int) -> torch.Tensor:
        weight = self.randn(outputs, inputs)
        some = self.below(outputs, max(1, outputs // 5))
        if kind == "trained":  # a few large columns, rows of very different length, some without any
            weight[:, self.below(inputs, 2)] *= 20
            weight *= (2 * self.randn(outputs, 1)).exp()
            weight[some] = 0
        if kind == "lengths":
            weight *= 10.0 ** (10 * self.randn(outputs, 1)).clamp(-15, 15)
        if kind == "ties":
            weight[some] = weight[self.number(outputs)].clone()
        if kind == "equal":
            weight[:] = weight[0].clone()
        if kind == "near":  # all but equal: they differ in the last bits of a few values
            weight[:] = weight[0].clone()
            weight *= 1 + (self.below(3, outputs, inputs) - 1) * (self.below(4, outputs, inputs) == 0) * 2.0**-8
        if kind == "bytes":  # next to the middle between two values of the copy
            weight = self.below(9, outputs, inputs) + 0.5 - 5 + 0.02 * weight
            weight[:, 0] = 127
        return weight

    def hidden(self, kind: str, rows: int, weight: torch.Tensor) -> torch.Tensor:
        inputs = weight.shape[1]
        x = self.randn(rows, inputs)
        if kind == "outliers":
            x[:, self.below(inputs, 1 + inputs // 32)] *= 10.0 ** (1 + self.number(4))
        if kind == "aligned":
            x = weight[self.below(len(weight), rows)] + 0.3 * x
        if kind == "zeros":
            x *= self.below(4, rows, inputs) == 0
            x[self.number(rows)] = 0
        if kind == "tiny":
            x *= 10.0 ** -(30.0 + self.number(16))
        if kind == "huge":
            x *= 10.0 ** (15 + self.number(23))
        if kind == "bad":
            x[self.number(rows), self.number(inputs)] = (NAN, INF, -INF)[self.number(3)]
        if kind == "bytes":
            x = (self.below(9, rows, inputs) - 4 + 0.49 * self.randn(rows, inputs).sign()).float()
            x[:, 0] = 127
        return x


WEIGHTS = ("random", "trained", "lengths", "ties", "equal", "near", "bytes")
HIDDEN = ("random", "outliers", "aligned", "zeros", "tiny", "huge", "bad", "bytes")


def both(library: CpuLibrary, weight: torch.Tensor) -> tuple[Matrix, Matrix]:
    """A matrix without its screen, and with it."""
    screened = library.screened(library.pack(plain_matrix(weight)))
    return replace(screened, screen=None), screened


def check(library: CpuLibrary, hidden: torch.Tensor, without: Matrix, screened: Matrix, num_best: int = 0) -> None:
    at = torch.arange(len(hidden))
    num_best = num_best or len(hidden)
    want, got = (library.score(hidden, Asked(at, matrix, num_best)) for matrix in (without, screened))
    assert got.finite.tolist() == want.finite.tolist()
    good = want.finite[:num_best]  # otherwise the best is any id
    assert got.best[good].tolist() == want.best[good].tolist()
    assert torch.equal(got.scores[want.finite[num_best:]], want.scores[want.finite[num_best:]])


@DTYPES
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_same_best_in_thousands_of_small_cases(
    library: CpuLibrary, any_threads: None, dtype: torch.dtype, kind: str
) -> None:
    for seed in range(150):
        draw = Draw(seed)
        torch.set_num_threads(1 + draw.number(7))
        weight = draw.weight(kind, 1 + draw.number(400), 1 + draw.number(90)).to(dtype)
        without, screened = both(library, weight)
        assert screened.screen is not None
        for hidden_kind in HIDDEN:
            rows = 1 + draw.number(33)
            hidden = draw.hidden(hidden_kind, rows, weight.float()).to(dtype)
            check(library, hidden, without, screened)
            check(library, hidden, without, screened, num_best=1 + draw.number(rows))


@DTYPES
@pytest.mark.parametrize("inputs", [3, 64, 101, 576])
def test_the_same_best_of_many(library: CpuLibrary, threads: int, dtype: torch.dtype, inputs: int) -> None:
    draw = Draw(inputs)
    for kind in ("random", "trained", "near"):
        weight = draw.weight(kind, 5003, inputs).to(dtype)
        without, screened = both(library, weight)
        for hidden_kind in ("random", "outliers", "aligned"):
            hidden = draw.hidden(hidden_kind, 33, weight.float()).to(dtype)
            for rows, num_best in ((1, 1), (2, 2), (7, 7), (9, 8), (33, 3), (33, 20), (33, 33)):
                check(library, hidden[:rows], without, screened, num_best)


@DTYPES
def test_too_many_in_question_are_all_scored(library: CpuLibrary, threads: int, dtype: torch.dtype) -> None:
    weight = Draw(0).weight("random", 3000, 32).to(dtype)
    weight[:] = weight[7].clone()
    without, screened = both(library, weight)
    for _ in range(30):  # after some of them the screen is left out
        hidden = Draw(1).randn(9, 32).to(dtype)
        check(library, hidden, without, screened)
        assert library.score(hidden, Asked(torch.arange(9), screened, 9)).best.tolist() == [0] * 9


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_a_weight_without_bounds_means_no_screen(library: CpuLibrary, value: float) -> None:
    weight = Draw(0).randn(300, 16)
    weight[299, 15] = value
    assert both(library, weight)[1].screen is None


def test_small_matrices_have_none(library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "SCREENED_OUTPUTS", 2048)
    small, large = (both(library, torch.ones(outputs, 4))[1] for outputs in (2047, 2048))
    assert small.screen is None
    assert large.screen is not None
    assert large.num_bytes == 2048 * 4 * 4 + library.screen_bytes(2048, 4)


def most_weight(library: CpuLibrary) -> int:
    """The largest weight of a copy, which holds them above a middle; it depends on the kind of CPU."""
    copy = both(library, torch.ones(1, 4))[1].screen
    assert copy is not None
    return int(copy[0]) // 2


def panels_of(screened: Matrix, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What the copy says: q [outputs, inputs], and the scale, E and W of each output."""
    assert screened.screen is not None
    steps = -(-screened.inputs // 4)
    panels = screened.screen[:-64].view(-(-screened.outputs // PANEL), -1).numpy()
    q = panels[:, : steps * PANEL * 4].reshape(-1, steps, PANEL, 4).transpose(0, 2, 1, 3).reshape(-1, steps * 4)
    facts = panels[:, steps * PANEL * 4 :].copy().view(np.float32)[:, : 3 * PANEL].reshape(-1, 3, PANEL)
    scale, error, length = facts.transpose(1, 0, 2).reshape(3, -1)[:, : screened.outputs].astype(np.float64)
    return q[: screened.outputs, : screened.inputs].astype(np.float64) - most - 1, scale, error, length


@DTYPES
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_copy_is_as_far_off_as_it_says(library: CpuLibrary, dtype: torch.dtype, kind: str) -> None:
    most = most_weight(library)
    assert most in {63, 127}
    for seed in range(20):
        draw = Draw(seed)
        weight = draw.weight(kind, 1 + draw.number(300), 1 + draw.number(90)).to(dtype)
        q, scale, error, length = panels_of(both(library, weight)[1], most)
        scaled = scale[:, None] * q
        assert np.abs(q).max() <= most
        off = np.linalg.norm(weight.double().numpy() - scaled, axis=1)
        assert (off <= error).all()
        assert (np.linalg.norm(scaled, axis=1) <= length).all()
        assert (error <= 1.0001 * (off + 1e-37)).all()
        assert (off <= scale * np.sqrt(weight.shape[1]) * 0.5001 + 1e-30).all()


@DTYPES
@pytest.mark.parametrize("kind", WEIGHTS)
def test_no_score_is_outside_of_its_bounds(library: CpuLibrary, dtype: torch.dtype, kind: str) -> None:
    for seed in range(60):
        draw = Draw(seed)
        weight = draw.weight(kind, 1 + draw.number(300), 1 + draw.number(90)).to(dtype)
        without, screened = both(library, weight)
        for hidden_kind in HIDDEN:
            hidden = draw.hidden(hidden_kind, 5, weight.float()).to(dtype)
            scores = library.score(hidden, Asked(torch.arange(5), without)).scores
            for row in range(5):
                bounds = library.score_bounds(hidden[row], screened)
                if bounds is not None:
                    least, most = bounds
                    assert bool((least <= scores[row]).all() & (scores[row] <= most).all()), (seed, hidden_kind, row)
