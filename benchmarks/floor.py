"""What a run's matrix products cost alone: the floor below any engine that is built on them.

    python -m benchmarks.floor --model DIR --rows FILE [--product torch|own] [--dtype bfloat16]

FILE holds a run's steps as JSON, `[[tokens computed, rows sampled], …]`, as `engine_run` gives them. Each step's
products are made once, in that order, with weights of the model's shapes: the layers for every token, the vocabulary
for rows that are sampled. Nothing else is done, so this is what remains if attention, norms, sampling and scheduling
cost nothing. Every layer has weights of its own, as in the model: they have to come from memory for every step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.threads import configure_threads

from .processes import Stopwatch, fresh, print_result
from .settings import dtype_of

if TYPE_CHECKING:
    import torch

    from headrace.engine.config import ModelConfig
    from headrace.kernels.backend import Backend
    from headrace.kernels.matrix import Matrix


@dataclass(frozen=True, slots=True)
class FloorRun:
    """One replay."""

    product: str  # whose matrix product
    wall_s: float
    cpu_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class Product:
    """One product with random weights; `make` takes rows, [rows, inputs]."""

    inputs: int
    make: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Products:
    """Those of a model, in the order in which a step makes them."""

    layers: list[Product]
    vocabulary: Product
    dtype: torch.dtype


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay the products of some steps and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--product", choices=("torch", "own"), default="torch")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args(arguments)
    configure_threads()
    import torch

    from headrace.engine.config import read_model_config

    steps: list[tuple[int, int]] = [(int(computed), int(sampled)) for computed, sampled in _read(given.rows)]
    with torch.inference_mode():
        products = make_products(read_model_config(given.model), getattr(torch, given.dtype), given.product)
        replay(steps[: len(steps) // 8 + 1], products)  # warm-up
        watch = Stopwatch()
        replay(steps, products)
        elapsed = watch.read()
    print_result(FloorRun(given.product, elapsed.wall_s, elapsed.cpu_s, len(steps)))


def _read(path: Path) -> list[list[int]]:
    found: list[list[int]] = json.loads(path.read_text())
    return found


def make_products(model: ModelConfig, dtype: torch.dtype, kind: str) -> Products:
    """Products as the decoder has them: query, key and value in one, gate and up in one. `kind` is "torch" or "own"."""
    new = _torch_product if kind == "torch" else _own_product
    hidden, middle = model.hidden_size, model.intermediate_size
    shapes = [
        (model.qkv_size, hidden),
        (hidden, model.num_heads * model.head_dim),
        (2 * middle, hidden),
        (hidden, middle),
    ]
    layers = [new(*shape, dtype) for _ in range(model.num_layers) for shape in shapes]
    return Products(layers, new(model.vocab_size, hidden, dtype), dtype)


def replay(steps: Sequence[tuple[int, int]], products: Products) -> None:
    """Make the products of each step (tokens computed, rows sampled), and throw the results away."""
    import torch

    most = max(computed for computed, _ in steps)
    widths = {product.inputs for product in products.layers} | {products.vocabulary.inputs}
    rows = {width: torch.randn(most, width).to(products.dtype) for width in widths}
    for computed, sampled in steps:
        for product in products.layers:
            product.make(rows[product.inputs][:computed])
        if sampled:
            products.vocabulary.make(rows[products.vocabulary.inputs][:sampled])


def _matrix(outputs: int, inputs: int, dtype: torch.dtype) -> Matrix:
    """Random weights where the engine has its own: in large pages."""
    import torch

    from headrace.kernels.matrix import plain_matrix

    return plain_matrix(torch.randn(outputs, inputs).to(dtype))


def _torch_product(outputs: int, inputs: int, dtype: torch.dtype) -> Product:
    from torch.nn import functional

    weight = _matrix(outputs, inputs, dtype).plain
    return Product(inputs, lambda x: functional.linear(x, weight))


def _own_product(outputs: int, inputs: int, dtype: torch.dtype) -> Product:
    """The backend's, with the weights in the form that it reads."""
    backend = _backend()
    matrix = _matrix(outputs, inputs, dtype)
    packed = backend.pack(matrix) if backend.pack is not None else matrix
    packed = backend.compressed(packed) if backend.compressed is not None else packed
    return Product(inputs, lambda x: backend.linear(x, packed, None))


@cache
def _backend() -> Backend:
    from headrace.kernels.backend import open_backend

    return open_backend("auto", "cpu")


def fresh_floor(model: Path, rows: Path, product: str) -> FloorRun:
    """Replay in a new process."""
    return fresh(
        FloorRun, "benchmarks.floor", "--model", model, "--rows", rows, "--product", product,
        "--dtype", dtype_of(model.name).replace("auto", "float32"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
