"""A decoder that runs through transformers' own code, with our paged attention as its attention function.

    token ids, positions [1, rows] → transformers' base model → hidden states [rows, hidden]
                                         ↓ in each layer
                                     attention_bridge.attend → paged attention over the runner's cache
    rows that are asked for        → transformers' head     → scores [rows, vocab]

The head is the causal language model itself around a base that gives the hidden states it is told, so that whatever
the model does to its scores (a scale, a cap, a bias) is done by the model.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...kernels.attention import Paging
from ...kernels.backend import Backend
from ...kernels.embedding import Asked, Scores, placed
from ...kernels.forward import Begin, Computed, Finish, Inputs
from ...kernels.kv_cache import KvCache, one_group
from ...kernels.linear import row_multiple
from ...kernels.matrix import Matrix
from ..checkpoint import Progress, hint, is_spare, some, weight_files
from ..errors import WeightsError
from ..passes import KvShape
from .attention_bridge import NAME, STEP, PagedStep, refused, register
from .transformers_config import TransformersConfig


class _Output:
    """What a base model gives, for a head: hidden states [1, rows, hidden] and nothing of all that it may also give."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: int | slice) -> Any:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(torch.nn.Module):
    """A base model that gives the hidden states that it is told, [1, rows, hidden]."""

    @property
    def decoder(self) -> _Given:
        """Where some heads look for the base model's own base."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Output:
        """Give `inputs_embeds` back as hidden states."""
        del args, kwargs
        return _Output(inputs_embeds)


class TransformersPasses:
    """`engine.passes.Passes` of a model of transformers that was built with `attention_bridge.NAME`.

    Raises:
        UnsupportedModelError: it has no base model, or no output matrix of its vocabulary's size.
    """

    def __init__(self, config: TransformersConfig, model: Any, kv: KvShape, backend: Backend) -> None:
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.kv = kv
        self.backend = backend
        self.queries_per_kv_head = config.num_heads // kv.num_kv_heads
        self._base, self._head = base_and_head(model)
        weight = _output_weight(model, config)
        self.dtype, self.device = weight.dtype, weight.device
        self.output = _matrix(weight)
        self.row_multiple = max(row_multiple(_matrix(each)) for each in _products(model, weight))

    def begin(self, cache: KvCache, max_rows: int, max_model_len: int) -> Begin:
        """See `Passes`. On the CPU a step is computed at its end, for whoever begins it does not wait."""
        del max_rows, max_model_len

        def begin(inputs: Inputs, asked: Asked | None) -> Finish:
            ((slots, paging),) = inputs.placements
            step = PagedStep(self.backend, cache, paging, slots, self.kv.head_dim, inputs.positions)
            return partial(self._compute, step, inputs, asked)

        return begin

    @torch.inference_mode()
    def score(self, hidden: torch.Tensor, asked: Asked) -> Scores:
        """See `Passes`."""
        picked = hidden.index_select(0, asked.rows).unsqueeze(0)
        product = self._head(inputs_embeds=picked, use_cache=False).logits[0]
        scores = placed(product, asked)
        finite = torch.isfinite(scores.sum(dim=1))
        best = scores[: asked.num_best].argmax(dim=1) if asked.num_best else asked.rows[:0]
        return Scores(best, scores[asked.num_best :], finite)

    def final(self, scores: torch.Tensor) -> torch.Tensor:
        """See `Passes`: the head has done it."""
        return scores

    @torch.inference_mode()
    def _compute(self, step: PagedStep, inputs: Inputs, asked: Asked | None) -> Computed:
        hidden = self.hidden(step, inputs.token_ids, inputs.positions)
        finite = torch.isfinite(hidden.sum(dtype=torch.float32))
        return Computed(hidden, finite, None if asked is None else self.score(hidden, asked))

    def hidden(self, step: PagedStep, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the rows of a step; token_ids and positions are int64 [rows].

        Raises:
            UnsupportedModelError: attention asked for what the bridge refuses, or not every layer attended.
        """
        packed: dict[str, Any] = {STEP: step}
        out = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **packed)
        step.check_complete()
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def rehearse(self) -> None:
        """Compute one token in a cache of one block, so that what the model refuses is refused before any request.

        Raises UnsupportedModelError.
        """
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        cache = torch.zeros((self.kv.num_layers, 2, 1, 16, self.kv.num_kv_heads, self.kv.head_dim), dtype=self.dtype)
        table, start, kv_len = (torch.tensor(part, dtype=torch.int32) for part in ([[0]], [0, 1], [1]))
        paging = Paging(table, start, kv_len)
        with torch.inference_mode():
            self.hidden(PagedStep(self.backend, one_group(cache), paging, one, self.kv.head_dim, one), one, one)


def base_and_head(model: Any) -> tuple[Any, Any]:
    """A model's base, and the same model around a base that gives what it is told. They share all weights."""
    children: dict[str, Any] = dict(model.named_children())
    name = next((name for name in (model.base_model_prefix, "model") if name in children), None)
    if name is None:
        raise refused("base_model", "its head cannot be told from the rest")
    head = copy.copy(model)
    head.__dict__["_modules"] = {**children, name: _Given()}
    return children[name], head


def _output_weight(model: Any, config: TransformersConfig) -> torch.Tensor:
    output = model.get_output_embeddings()
    weight = getattr(output, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or len(weight) != config.vocab_size:
        raise refused("output", f"it has no output matrix of {config.vocab_size} tokens")
    return weight.detach()


def _matrix(weight: torch.Tensor) -> Matrix:
    return Matrix(weight, weight.shape[0], weight.shape[1])


def _products(model: Any, output: torch.Tensor) -> list[torch.Tensor]:
    """One weight [outputs, inputs] for each size of product in a model."""
    found: dict[tuple[int, ...], torch.Tensor] = {tuple(output.shape): output}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            found.setdefault(tuple(module.weight.shape), module.weight.detach())
    return list(found.values())


def load_transformers_model(
    model_dir: Path, config: TransformersConfig, dtype: torch.dtype, progress: Progress | None = None
) -> Any:
    """Load a checkpoint into transformers' own model, in evaluation mode, from safetensors alone.

    Raises:
        WeightsError: tensors are missing, unexpected or of another shape.
        UnsupportedModelError: there are only pickles.
    """
    register()
    num_bytes = sum(path.stat().st_size for path in weight_files(model_dir))
    try:
        with _no_progress_bars():
            model, said = config.model_class.from_pretrained(
                model_dir,
                config=copy.deepcopy(config.raw),
                dtype=dtype,
                attn_implementation=NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused below, with the others
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightsError(f"The weights cannot be loaded: {' '.join(str(error).split())}") from error
    _check_loaded(said, config)
    if progress is not None:
        progress(num_bytes, num_bytes)
    return model.eval()


@contextmanager
def _no_progress_bars() -> Generator[None]:
    """Have transformers draw none: the worker's log is no terminal."""
    from transformers.utils import logging

    bars: Any = logging
    drawn = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            bars.enable_progress_bar()


def _check_loaded(said: dict[str, Any], config: TransformersConfig) -> None:
    """Raise WeightsError for what did not fit, as transformers says after loading."""
    tied = bool(getattr(config.raw, "tie_word_embeddings", False))
    missing = sorted(map(str, said["missing_keys"]))
    unexpected = [name for name in sorted(map(str, said["unexpected_keys"])) if not is_spare(name, tied=tied)]
    wrong = {str(name): (list(found), list(asked)) for name, found, asked in said["mismatched_keys"]}
    shapes = [f"{name} is {found} instead of {asked}" for name, (found, asked) in sorted(wrong.items())]
    errors = [str(error) for error in said.get("error_msgs") or ()]
    parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes), ("not loaded", errors))
    complaints = [f"{what}: {some(names)}" for what, names in parts if names]
    if complaints:
        names = (*missing, *unexpected, *sorted(wrong))
        message = f"The weights do not fit the configuration; {'; '.join(complaints)}.{hint(missing, tied=tied)}"
        raise WeightsError(message, names)
