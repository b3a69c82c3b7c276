"""The other kernels on the device, at real shapes: norms, gates, rotation and store, the sampler, copies of blocks."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from headrace.kernels import adjust as adjust_reference
from headrace.kernels import logprobs as logprobs_reference
from headrace.kernels.adjust import Adjustments
from headrace.kernels.gpu import adjust, block_copy, cut, gated, logprobs, rms_norm, rotary, sample
from headrace.kernels.gpu.packing import pack
from headrace.kernels.kv_layout import FLOAT8_LARGEST
from tests.support import rotary_checks, sampler_checks
from tests.support.tolerances import assert_close

from .afar import afar, same_bits
from .notebook import Notebook
from .sizes import CACHED, NAMES, CheckSizes, check_sizes

TITLE = "Norms, gates, rotation, sampler, copies"
HOW = (
    "Inputs are made on the CPU, computed with on the device, and held against float64 or the reference on the CPU, "
    "with the checks and tolerances of tests/support; where a kernel has the reference's bits, bits are compared."
)
EPS = 1e-5


def find(notes: Notebook) -> None:
    """Do all checks of this part."""
    sizes, device = check_sizes(notes.ground.dry), notes.ground.device
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        notes.check(f"rms_norm and add_rms_norm, {name}", partial(_norms, afar(rms_norm, device), sizes, dtype))
        for kind in ("silu_mul", "gelu_mul"):
            notes.check(f"{kind}, {name}", partial(_gates, afar(gated, device), kind, sizes, dtype))
    _rotation(notes, afar(rotary, device), sizes)
    _sampler(notes, sizes)
    notes.check("adjust: the reference's bits", partial(_adjust, afar(adjust, device), sizes))
    notes.check("logprobs", partial(_logprobs, afar(logprobs, device), sizes))
    for cached in CACHED:
        what = f"copy of blocks, {NAMES[cached]}"
        notes.check(what, partial(_copies, afar(block_copy, device), cached, sizes))


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _norms(module: ModuleType, sizes: CheckSizes, dtype: torch.dtype) -> None:
    x, residual = (_normal(sizes.rows, sizes.hidden, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = _normal(sizes.hidden, seed=2)
    assert_close(module.rms_norm(x, weight, EPS), _norm64(x, weight))
    normed, total = module.add_rms_norm(x, residual, weight, EPS)
    same_bits(total, x + residual)
    assert_close(normed, _norm64(total, weight))
    same_bits(module.rms_norm(x[1:2], weight, EPS), module.rms_norm(x, weight, EPS)[1:2])


def _gates(module: ModuleType, kind: str, sizes: CheckSizes, dtype: torch.dtype) -> None:
    gate_up = _normal(sizes.rows, 2 * sizes.middle, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate)
    if kind == "gelu_mul":
        activated = torch.nn.functional.gelu(gate, approximate="tanh")
    got = getattr(module, kind)(gate_up)
    assert_close(got, activated * up)
    same_bits(getattr(module, kind)(gate_up[1:2]), got[1:2])


def _rotation(notes: Notebook, module: ModuleType, sizes: CheckSizes) -> None:
    for shape in sizes.rotary:
        notes.check(f"rotate_and_store {shape}, bf16", partial(_rotated_floats, module, shape))
        for cached in (torch.int8, *FLOAT8_LARGEST):
            what = f"rotate_and_store {shape}, {NAMES[cached]}"
            notes.check(what, partial(_rotated, module, shape, cached))
    for cached in FLOAT8_LARGEST:
        what = f"every value of {NAMES[cached]}, and between"
        notes.check(what, partial(rotary_checks.check_every_float8, module, cached))
    notes.check("odd vectors of int8", partial(rotary_checks.check_odd_int8, module))


def _rotated_floats(module: ModuleType, shape: rotary_checks.Shape) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        rotary_checks.check_floats(module, shape, dtype)


def _rotated(module: ModuleType, shape: rotary_checks.Shape, cached: torch.dtype) -> None:
    rotary_checks.check_rounded(module, shape, cached)
    rotary_checks.check_bytes(module, shape, cached)


DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no cuts": {"temperature": [0.7, 1.0, 0.0, 1.5]},
    "top_k": {"temperature": [0.7, 1.0], "top_k": [1, 20, 50, 0]},
    "top_p": {"temperature": [0.7, 1.0], "top_p": [0.9, 0.5, 0.99]},
    "min_p": {"min_p": [0.1, 0.0, 0.01]},
    "all cuts": {"temperature": [0.7, 1.3], "top_k": [40, 0], "top_p": [0.95, 0.8, 1.0], "min_p": [0.02, 0.0]},
}


def _sampler(notes: Notebook, sizes: CheckSizes) -> None:
    device = notes.ground.device
    for name, wanted in DRAWS.items():
        notes.check(f"sample, {name}", partial(_drawn, afar(sample, device), sizes, wanted))
    for name in ("top_k", "top_p", "min_p", "all cuts"):
        notes.check(f"what is left by {name}", partial(_cut, afar(cut, device), sizes, DRAWS[name]))
    notes.check("sample: a row alone and in a batch, two runs", partial(_drawn_alone, afar(sample, device), sizes))


def _drawn(module: ModuleType, sizes: CheckSizes, wanted: dict[str, Any]) -> None:
    scores = sampler_checks.normal(sizes.drawn, sizes.vocab)
    sampler_checks.check_tokens(scores, sampler_checks.parameters(sizes.drawn, **wanted), module)


def _cut(module: ModuleType, sizes: CheckSizes, wanted: dict[str, Any]) -> None:
    scores = sampler_checks.normal(sizes.drawn, sizes.vocab)
    sampler_checks.check_cuts(scores, sampler_checks.parameters(sizes.drawn, **wanted), module)


def _drawn_alone(module: ModuleType, sizes: CheckSizes) -> str:
    scores = sampler_checks.normal(sizes.drawn, sizes.vocab)
    asked = sampler_checks.parameters(sizes.drawn, **DRAWS["all cuts"])
    whole = module.sample(scores, asked)
    same_bits(module.sample(scores, asked), whole)
    for row in (0, sizes.drawn - 1):
        same_bits(module.sample(scores[row : row + 1], sampler_checks.pick(asked, [row])), whole[row : row + 1])
    return f"{pack(asked).words.shape[0]} rows"


def _adjust(module: ModuleType, sizes: CheckSizes) -> None:
    random, count = torch.Generator().manual_seed(0), min(5000, sizes.drawn * sizes.vocab // 4)
    at = torch.randperm(sizes.drawn * sizes.vocab, generator=random)[:count]
    factor, subtract, bias = torch.randn((3, count), generator=random)
    bias[::10] = float("-inf")
    entries = Adjustments(at // sizes.vocab, at % sizes.vocab, factor.abs() + 0.1, subtract, bias)
    scores = _normal(sizes.drawn, sizes.vocab) * 8
    want = scores.clone()
    adjust_reference.adjust(want, entries)
    module.adjust(scores, entries)
    same_bits(scores, want)


def _logprobs(module: ModuleType, sizes: CheckSizes) -> None:
    """Values against float64, within what kernels/gpu/logprobs.py derives; ids are the reference's."""
    scores = _normal(sizes.drawn, sizes.vocab) * 4
    chosen = (torch.arange(sizes.drawn) * 997 + 5) % sizes.vocab
    rows, counts = list(range(sizes.drawn)), [(0, 3, 20, 1)[row % 4] for row in range(sizes.drawn)]
    found = logprobs_reference.pairs(module.logprobs(scores, rows, chosen, counts), counts)
    plain = logprobs_reference.pairs(logprobs_reference.logprobs(scores, rows, chosen, counts), counts)
    for row, (own, best), (_, wanted) in zip(rows, found, plain, strict=True):
        want = scores[row].double().log_softmax(0)
        if [token for token, _ in best] != [token for token, _ in wanted]:
            raise AssertionError(f"row {row}: the best are {best} instead of {wanted}")
        for value, exact in [(own, want[chosen[row]]), *((value, want[token]) for token, value in best)]:
            if not abs(value - float(exact)) <= 2.0**-17 + 2.0**-23 * abs(float(exact)):
                raise AssertionError(f"row {row}: {value} instead of {float(exact)}")


def _copies(module: ModuleType, cached: torch.dtype, sizes: CheckSizes) -> None:
    width = sizes.block_width + (4 if cached == torch.int8 else 0)
    shape = (sizes.layers, 2, 7, 16, 4, width)
    count = torch.Size(shape).numel() * cached.itemsize
    noise = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cache, pairs = noise.view(cached).view(shape), [(1, 6), (4, 2), (1, 0)]
    want = cache.view(torch.uint8).clone()
    for source, destination in pairs:
        want[:, :, destination] = cache.view(torch.uint8)[:, :, source]
    module.copy_blocks(cache, pairs)
    same_bits(cache, want)
