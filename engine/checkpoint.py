"""The safetensors files of a checkpoint: found, checked by their headers, and copied into tensors.

Pickles are refused: opening one runs whatever code is in it. Files are read through a small buffer instead of being
mapped: pages of a mapped file count as the process's memory until they are let go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import torch

from .errors import UnsupportedModelError, WeightsError
from .json_file import MOST_INDEX_BYTES, is_file, read_json
from .safetensors_header import HeaderError, StoredTensor, read_header

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NAMES_SHOWN = 6  # of the tensors that an error lists
BUFFER_BYTES = 8 << 20
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # what weights may be stored in

Progress = Callable[[int, int], None]  # (bytes of weights read, bytes in all)


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, in name order.

    Raises:
        UnsupportedModelError: there are only pickles, or only GGUF files.
        WeightsError: there are none, or the index names a file that is not there.
        ModelError: the index is no JSON object.
    """
    index = model_dir / INDEX
    if is_file(index):
        return _indexed_files(index)
    if is_file(model_dir / "model.safetensors"):
        return (model_dir / "model.safetensors",)
    refuse_foreign_weights(model_dir)
    parts = sorted(path.name for path in model_dir.glob("model-*-of-*.safetensors"))
    if parts:
        raise WeightsError(f"{model_dir} holds parts of a checkpoint ({some(parts)}), but no {INDEX} that lists them.")
    raise WeightsError(f"{model_dir} holds no model.safetensors and no {INDEX}.")


def refuse_foreign_weights(model_dir: Path) -> None:
    """Raise UnsupportedModelError for a folder that has weights, but none in safetensors."""
    if any(model_dir.glob("*.safetensors")) or is_file(model_dir / INDEX):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in model_dir.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            "pickle",
            f"{model_dir} holds its weights as pickles ({some(pickles)}), which can run code; convert to safetensors.",
        )
    gguf = sorted(path.name for path in model_dir.glob("*.gguf"))
    if gguf:
        raise UnsupportedModelError(
            "gguf",
            f"{model_dir} holds its weights as GGUF ({some(gguf)}), which is not read; "
            "take the folder with safetensors that they were made of.",
        )


def _indexed_files(index: Path) -> tuple[Path, ...]:
    """The files that an index names."""
    weight_map: object = read_json(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{index} has no map from tensors to files (weight_map).")
    names = sorted({str(name) for name in cast("dict[str, object]", weight_map).values()})
    pickles = [name for name in names if not name.endswith(".safetensors") and Path(name).name == name]
    missing = tuple(name for name in names if not _is_beside(index, name))
    if missing or not names:
        raise WeightsError(f"{index} names files that are not beside it: {some(missing) or 'none at all'}.", missing)
    if pickles:
        raise WeightsError(f"{index} names files that are no safetensors: {some(pickles)}.", tuple(pickles))
    return tuple(index.parent / name for name in names)


def _is_beside(index: Path, name: str) -> bool:
    return "\0" not in name and Path(name).name == name and is_file(index.parent / name)


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in a checkpoint, from the headers alone. Raises as `open_checkpoint` does."""
    with open_checkpoint(model_dir) as checkpoint:
        return checkpoint.shapes


@dataclass(frozen=True, slots=True)
class _Shard:
    """One open file."""

    path: Path
    file: BinaryIO
    tensors: tuple[StoredTensor, ...]  # in the order of their bytes


class Checkpoint:
    """A checkpoint whose files are open and whose headers have been checked. A context manager that closes them."""

    def __init__(self, shards: tuple[_Shard, ...], files: ExitStack) -> None:
        self._shards = shards
        self._files = files

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {tensor.name: tensor.shape for shard in self._shards for tensor in shard.tensors}

    def fill(self, views: Mapping[str, torch.Tensor], progress: Progress | None = None) -> None:
        """Copy the tensors that `views` names into them, each of the stored shape; the type is converted.

        progress  called with (bytes read, bytes in all) after each tensor

        Raises:
            WeightsError: a tensor is of a type that no weights have, or a file ends before its header says.
        """
        wanted = [(shard, t) for shard in self._shards for t in shard.tensors if t.name in views]
        _check_types([tensor for _, tensor in wanted])
        done, total = 0, sum(tensor.num_bytes for _, tensor in wanted)
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        for shard, tensor in wanted:
            try:
                _copy(shard.file, tensor, views[tensor.name], buffer)
            except OSError as error:
                raise WeightsError(f"{shard.path} cannot be read: {error}", (shard.path.name,)) from error
            done += tensor.num_bytes
            if progress is not None:
                progress(done, total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open the files of a checkpoint and read their headers, and nothing else.

    Raises:
        UnsupportedModelError: the weights are in no safetensors.
        WeightsError: a file is missing or damaged, or two hold a tensor of the same name.
    """
    with ExitStack() as files:
        shards = tuple(_open_shard(path, files) for path in weight_files(model_dir))
        home: dict[str, str] = {}
        for shard in shards:
            for tensor in shard.tensors:
                if (other := home.setdefault(tensor.name, shard.path.name)) != shard.path.name:
                    raise WeightsError(
                        f"{model_dir} holds {tensor.name} twice: in {other} and in {shard.path.name}.", (tensor.name,)
                    )
        return Checkpoint(shards, files.pop_all())


def _open_shard(path: Path, files: ExitStack) -> _Shard:
    try:
        file = files.enter_context(path.open("rb", buffering=0))
        return _Shard(path, file, read_header(file, os.fstat(file.fileno()).st_size))
    except (HeaderError, OSError) as error:
        raise WeightsError(f"{path} is no readable safetensors file: {error}.", (path.name,)) from error


def _check_types(tensors: list[StoredTensor]) -> None:
    """Raise WeightsError for weights in a type that only quantised ones have."""
    wrong = [tensor for tensor in tensors if tensor.dtype not in DTYPES]
    if wrong:
        described = some(f"{tensor.name} is {tensor.dtype}" for tensor in wrong)
        raise WeightsError(
            f"Weights must be of type {', '.join(DTYPES)}; {described}. Quantised weights are not supported.",
            tuple(tensor.name for tensor in wrong),
        )


def _copy(file: BinaryIO, tensor: StoredTensor, target: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy one tensor, by way of `buffer` unless its bytes can go straight to their place."""
    if target.numel() == 0:
        return
    file.seek(tensor.begin)
    dtype = DTYPES[tensor.dtype]
    in_one_piece = target.is_contiguous()
    if in_one_piece and target.dtype == dtype and target.device.type == "cpu":
        _read_into(file, target.view(-1).view(torch.uint8))
        return
    rows = target.view(-1) if in_one_piece else target
    row_bytes = tensor.num_bytes // len(rows)
    if row_bytes > len(buffer):
        buffer = torch.empty(row_bytes, dtype=torch.uint8)
    step = len(buffer) // row_bytes
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        stored = buffer[: len(part) * row_bytes]
        _read_into(file, stored)
        part.copy_(stored.view(dtype).view(part.shape))


def _read_into(file: BinaryIO, target: torch.Tensor) -> None:
    """Fill `target`, uint8 on the CPU, with the next bytes. Raises OSError where the file ends before."""
    memory = target.numpy().data
    while memory:
        count = file.readinto(memory)  # pyright: ignore
        if not count:
            raise OSError("it is shorter than its header says")
        memory = memory[count:]


def is_spare(name: str, *, tied: bool) -> bool:
    """Whether a tensor follows from the rest, although some exporters write it; `tied`: the output matrix does, too."""
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def some(names: list[str] | tuple[str, ...] | Iterator[str]) -> str:
    """The first few of a list of names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more
