"""Norms and gated activations in Triton, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from headrace.kernels.gated import Clamp
from headrace.kernels.gpu import gated, rms_norm
from tests.support.mutations import Fault, assert_found
from tests.support.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
EPS = 1e-2
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that are meant
CLAMP = Clamp(alpha=1.702, limit=1.5)
KINDS = ("silu_mul", "gelu_mul", "clamped_mul")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def gated64(kind: str, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if kind == "silu_mul":
        return gate * torch.sigmoid(gate) * up
    if kind == "gelu_mul":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=CLAMP.limit), up.clamp(-CLAMP.limit, CLAMP.limit)
    return gate * torch.sigmoid(CLAMP.alpha * gate) * (up + 1)


def called(module: ModuleType, kind: str, gate_up: torch.Tensor) -> torch.Tensor:
    return getattr(module, kind)(gate_up, *([CLAMP] if kind == "clamped_mul" else []))


@DTYPES
@pytest.mark.parametrize(("rows", "hidden"), [(5, 1), (70, 16), (33, 37), (3, 576), (3, 3000), (2, 16384)])
def test_rms_norm(dtype: torch.dtype, rows: int, hidden: int) -> None:
    x, weight = randn(rows, hidden, dtype=dtype) * 3, randn(hidden, seed=1)
    before = x.clone()
    assert_close(rms_norm.rms_norm(x, weight, EPS), norm64(x, weight))
    assert torch.equal(x, before), "the input was changed"


@DTYPES
@pytest.mark.parametrize(("rows", "hidden"), [(5, 1), (33, 37), (3, 3000)])
def test_add_rms_norm_leaves_its_inputs_alone(dtype: torch.dtype, rows: int, hidden: int) -> None:
    x, residual = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype, seed=2)
    weight, copies = randn(hidden, seed=1), (x.clone(), residual.clone())
    normed, total = rms_norm.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_close(normed, norm64(total, weight))
    assert torch.equal(x, copies[0]) and torch.equal(residual, copies[1]), "an input was changed"


def test_rms_norm_of_zero_and_of_nan_in_rows_of_one_program() -> None:
    x = torch.zeros(3, 20)
    x[1, 7] = float("nan")
    got = rms_norm.rms_norm(x, torch.ones(20), 1e-5)
    assert (got[0] == 0).all() and torch.isnan(got[1]).all() and (got[2] == 0).all()


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 37, 1536])
def test_gated(dtype: torch.dtype, kind: str, width: int) -> None:
    gate_up = randn(5, 2 * width, dtype=dtype) * 4
    before = gate_up.clone()
    assert_close(called(gated, kind, gate_up), gated64(kind, gate_up))
    assert torch.equal(gate_up, before), "the input was changed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("up", [1.0, -1e4])
def test_gated_far_from_zero(kind: str, up: float) -> None:
    gates = [0.0, 1e-30, 5.0, 88.0, 120.0, 1e4, 1e13, 1e30]
    for gate in (sign * each for each in gates for sign in (1.0, -1.0)):
        row = torch.tensor([[gate, up]])
        vanishing = torch.tensor([[1e-36 * abs(up)]]).double()  # 0 where exp(-gate) is infinite in float32
        assert_close(called(gated, kind, row), gated64(kind, row), slack=vanishing)
    for row in ([float("nan"), 1.0], [1.0, float("nan")]):
        assert called(gated, kind, torch.tensor([row])).isnan().all()


def test_rows_do_not_depend_on_their_neighbours() -> None:
    weight = randn(37, seed=1)
    for rows in (randn(40, 37), randn(40, 37, dtype=torch.bfloat16)):
        normed, total = rms_norm.add_rms_norm(rows, rows.flip(1), weight, EPS)
        for row in (0, 15, 16, 39):
            alone = rms_norm.add_rms_norm(rows[row : row + 1], rows.flip(1)[row : row + 1], weight, EPS)
            assert torch.equal(alone[0][0], normed[row]) and torch.equal(alone[1][0], total[row])
    gate_up = randn(6, 74)
    for kind in KINDS:
        assert torch.equal(called(gated, kind, gate_up[4:5])[0], called(gated, kind, gate_up)[4])


def test_no_rows_and_rows_that_do_not_lie_together() -> None:
    wide, weight = randn(4, 60), randn(38, seed=1)
    x = wide[:, 5:43]
    assert_close(rms_norm.rms_norm(x, weight, EPS), norm64(x, weight))
    assert_close(rms_norm.add_rms_norm(x, wide[:, :38], weight, EPS)[0], norm64(x + wide[:, :38], weight))
    assert_close(gated.silu_mul(x), gated64("silu_mul", x))
    assert rms_norm.rms_norm(x[:0], weight, EPS).shape == (0, 38) and gated.silu_mul(x[:0]).shape == (0, 19)


def check_norms(module: ModuleType) -> None:
    x, residual, weight = randn(2, 37) * 0.1, randn(2, 37, seed=2) * 0.1, randn(37, seed=1)
    assert_close(module.rms_norm(x, weight, EPS), norm64(x, weight))
    x, residual = x.bfloat16(), residual.bfloat16()
    normed, total = module.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    # the norm of a sum that is not rounded differs in its last bit here and there
    assert torch.equal(normed, norm64(total, weight).bfloat16())


def check_gated(module: ModuleType) -> None:
    gate_up = randn(2, 74) * 2
    for kind in KINDS:
        assert_close(called(module, kind, gate_up), gated64(kind, gate_up))


FAULTS = [
    Fault("rms_norm", "mean + eps", "mean"),
    Fault("rms_norm", "[:, None] * weight", "[:, None]"),
    Fault("rms_norm", "/ HIDDEN", "/ COLUMNS"),
    Fault("rms_norm", "x = total.to(tl.float32)", "x += tl.load(residual_ptr + at, mask=inside).to(tl.float32)"),
    Fault("rms_norm", "(row < rows) & ", ""),
    Fault("gated", "tl.load(at + WIDTH,", "tl.load(at,"),
    Fault("gated", "gate = tl.load(at,", "gate = tl.load(at + WIDTH,"),
    Fault("gated", "inside = column < WIDTH", "inside = column <= WIDTH"),
    Fault("gated", "tl.where(gate > limit, limit, gate)", "gate"),
    Fault("gated", "tl.where(up < -limit, -limit, up)", "up"),
    Fault("gated", "tl.where(up > limit, limit, ", "("),
    Fault("gated", "-alpha * gate", "-gate"),
    Fault("gated", " + 1.0\n", "\n"),
    Fault("gated", " * _CUBIC", " * 0.045"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_fault_is_found(fault: Fault) -> None:
    assert_found(fault, check_norms if fault.module == "rms_norm" else check_gated, fault.module)
