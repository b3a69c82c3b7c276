"""The safetensors files of a checkpoint.

Pickles are refused: opening one runs whatever code is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .config import read_json
from .errors import UnsupportedModelError, WeightsError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NAMES_SHOWN = 6  # of the tensors that an error lists


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, in name order.

    Raises:
        UnsupportedModelError: there are only pickles.
        WeightsError: there are none, or the index names a file that is not there.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted({str(name) for name in read_json(index).get("weight_map", {}).values()})
        missing = tuple(name for name in names if Path(name).name != name or not (model_dir / name).is_file())
        if missing or not names:
            raise WeightsError(
                f"{index} names files that are not beside it: {some(missing) or 'none at all'}.", missing
            )
        return tuple(model_dir / name for name in names)
    if (model_dir / "model.safetensors").is_file():
        return (model_dir / "model.safetensors",)
    pickles = sorted(path.name for pattern in PICKLES for path in model_dir.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            "pickle",
            f"{model_dir} holds its weights as pickles ({some(pickles)}), which can run code; convert to safetensors.",
        )
    raise WeightsError(f"{model_dir} holds no model.safetensors and no model.safetensors.index.json.")


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in a checkpoint, from the headers alone. Raises WeightsError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(model_dir):
        with open_file(path) as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


def open_file(path: Path) -> Any:
    """Open one safetensors file for reading."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is no readable safetensors file: {error}", (path.name,)) from error


def some(names: list[str] | tuple[str, ...] | Iterator[str]) -> str:
    """The first few of a list of names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more
