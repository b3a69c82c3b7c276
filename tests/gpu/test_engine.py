"""Whole steps of an engine on the Triton kernels, interpreted: the scores of the torch path, no bit from neighbours.

Tolerance: both compute in float32 and sum in another order. A product or a softmax over n ≤ 400 terms loses about
sqrt(n) · 2⁻²⁴ ≤ 2⁻¹⁹ of its largest partial sum, each of the few dozen operations of three layers adds as much, and
scores are products again: 2⁻¹⁴ of the largest score (measured: below 2⁻¹⁷).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.kernels.gpu import shapes
from tests.support import torch_rig
from tests.support.checkpoints import Shape
from tests.support.families import VOCAB, WINDOW, family_checkpoint
from tests.support.torch_rig import TorchRig, backend, prompt, rig

TOLERANCE = 2.0**-14
SHAPE = Shape(layers=2)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def both(
    shape: Shape | Path, requests: dict[str, tuple[list[int], dict[str, object]]], **config: object
) -> list[TorchRig]:
    """The same requests on the torch path and on Triton."""
    made: list[TorchRig] = []
    for name in ("torch", "triton"):
        each = rig(shape, name, **config)
        for request_id, (ids, options) in requests.items():
            each.add(request_id, ids, **options)
        made.append(each.run())
    return made


def same(plain: TorchRig, ours: TorchRig) -> None:
    assert plain.tokens == ours.tokens
    for key in plain.logits:
        close(ours.scores(*key), plain.scores(*key))


def test_a_mixed_batch() -> None:
    """Prompts in chunks beside decodes, blocks shared by two requests, greedy and sampled rows."""
    requests: dict[str, tuple[list[int], dict[str, object]]] = {
        "long": (prompt(18, SHAPE.vocab), {"max_tokens": 3}),
        "again": (prompt(18, SHAPE.vocab), {"max_tokens": 2}),
        "short": (prompt(3, SHAPE.vocab, 1), {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 7}),
        "one": ([5], {"temperature": 1.0, "seed": 8, "n": 2, "max_tokens": 3}),
    }
    same(*both(SHAPE, requests, max_num_batched_tokens=9))


@pytest.mark.parametrize(
    ("family", "length"), [("gemma2", WINDOW + 3), ("gpt-oss", WINDOW + 3), ("qwen3", 10), ("phi3", 10), ("olmo2", 10)]
)
def test_architectures(family: str, length: int) -> None:
    """Windows, caps, sinks, norms of queries and keys, partial rotation, norms around."""
    requests: dict[str, tuple[list[int], dict[str, object]]] = {
        "long": (prompt(length, VOCAB), {"max_tokens": 2}),
        "short": (prompt(3, VOCAB, 1), {"max_tokens": 2}),
    }
    same(*both(family_checkpoint(family), requests, max_num_batched_tokens=9))


def test_preempted() -> None:
    """Too few blocks for all choices: who gives way is computed anew, and no block that is free is read."""
    requests: dict[str, tuple[list[int], dict[str, object]]] = {
        "me": (prompt(9, SHAPE.vocab), {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 6})
    }
    plain, ours = both(SHAPE, requests, num_kv_blocks=7, max_model_len=24, enable_prefix_caching=False)
    same(plain, ours)
    assert ours.engine.stats().preemptions > 0


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_kv_types(kind: str) -> None:
    requests: dict[str, tuple[list[int], dict[str, object]]] = {
        "me": (prompt(13, SHAPE.vocab), {"max_tokens": 3}), "n": (prompt(6, SHAPE.vocab, 2), {"n": 2, "max_tokens": 2}),
    }  # fmt: skip
    # float8's scales come from a trial of so many tokens
    same(*both(SHAPE, requests, kv_cache_dtype=kind, max_model_len=16))


def alone_and_in_company(config: dict[str, object]) -> tuple[TorchRig, TorchRig]:
    made: list[TorchRig] = []
    for company in ((), (1, 3)):
        each = rig(SHAPE, "triton", **config)
        each.add("me", prompt(10, SHAPE.vocab), max_tokens=3)
        for number in company:
            each.add(f"{number}", prompt(4 * number, SHAPE.vocab, number), max_tokens=2)
        made.append(each.run())
    return made[0], made[1]


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_neighbours_change_no_bit(kind: str) -> None:
    """The whole prompt in one step, for on a GPU how a prompt is cut may change the last bits."""
    alone, beside = alone_and_in_company({"kv_cache_dtype": kind})
    assert torch.equal(alone.scores("me"), beside.scores("me"))


def sharing_rig(monkeypatch: pytest.MonkeyPatch, *, on: bool) -> TorchRig:
    """Three sequences on one prefix of a split and more, one alone."""
    ops = backend("triton")
    monkeypatch.setattr(torch_rig, "backend", lambda _: replace(ops, sharing=ops.sharing if on else None))
    monkeypatch.setattr(shapes, "SPLIT", 64)  # so that what is shared need not be 256 positions long
    shape = Shape(layers=1, hidden=32, heads=2, kv_heads=1)
    made = rig(shape, "triton", block_size=16, max_model_len=128, num_kv_blocks=100, max_num_batched_tokens=300)
    shared = prompt(66, shape.vocab)
    for number in range(3):
        made.add(f"{number}", [*shared, *prompt(3 + number, shape.vocab, number)], max_tokens=4)
        made.step()  # so that the next one finds what this one has computed
    made.add("other", prompt(5, shape.vocab, 9), max_tokens=3)
    return made.run()


def test_a_shared_prefix_is_read_once_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.kernels.gpu import decode

    seen: list[object] = []
    launch = decode.shared_prefix_parts
    monkeypatch.setattr(decode, "shared_prefix_parts", lambda *args: (seen.append(args[3].shared), launch(*args)))
    on, off = sharing_rig(monkeypatch, on=True), sharing_rig(monkeypatch, on=False)
    assert any(each is not None for each in seen)
    for key in on.logits:
        assert torch.equal(on.scores(*key), off.scores(*key)), key


def test_the_backend_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.kernels.backend import choose_backend
    from headrace.kernels.errors import BackendError, BuildError

    none = BuildError("not wanted")
    assert choose_backend("auto", "cuda", none).name == "triton"
    assert choose_backend("auto", "cpu", none).name == "torch"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="does not run on cpu"):
        choose_backend("triton", "cpu", none)
    with pytest.raises(BackendError, match=r"cpu-onednn.*does not run on cuda"):
        choose_backend("cpu-onednn", "cuda", none)
