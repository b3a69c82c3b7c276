"""The safetensors files of a checkpoint: found, checked by their headers, and copied into tensors.

Pickles are refused: opening one runs whatever code is in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import torch

from .errors import UnsupportedModelError, WeightsError
from .json_file import MOST_INDEX_BYTES, is_file, read_json
from .safetensors_header import HeaderError, StoredTensor, read_header
from .tensor_copy import BUFFER_BYTES, DTYPES, PACKED, Place, Source, copy, copy_groups, copy_transposed

INDEX = "model.safetensors.index.json"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # which may be one and the same
# Scales of a float8 KV cache as exporters write them, in each layer: of all heads together, or of each.
KV_SCALE = re.compile(
    r"model\.layers\.(\d{1,4})\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.(?:output_scale|[kv]_scale))"
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NAMES_SHOWN = 6  # of the tensors that an error lists

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

    def fill(self, places: Mapping[str, Place], progress: Progress | None = None) -> None:
        """Copy the tensors that `places` names to where they are to lie, each of the stored shape; types are converted.

        progress  called with (bytes read, bytes in all) after each tensor

        Raises:
            WeightsError: a tensor is of a type that no weights have, or a file ends before its header says.
        """
        stored = {t.name: Source(shard.path, shard.file, t) for shard in self._shards for t in shard.tensors}
        wanted = [source for name, source in stored.items() if name in places]
        parts = [[source, *_scales(places[source.tensor.name], stored)] for source in wanted]
        _check_types([source.tensor for part in parts if len(part) == 1 for source in part], tuple(DTYPES))
        _check_types([source.tensor for part in parts if len(part) > 1 for source in part], (PACKED,))
        done, total = 0, sum(source.tensor.num_bytes for part in parts for source in part)
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        for source, *scales in parts:
            place = places[source.tensor.name]
            try:
                if scales:
                    copy_groups(source, scales[0], place.view)
                elif place.transposed:
                    copy_transposed(source, place.view)
                else:
                    copy(source, place.view, buffer)
            except OSError as error:
                raise WeightsError(f"{source.path} cannot be read: {error}", (source.path.name,)) from error
            done += sum(each.tensor.num_bytes for each in (source, *scales))
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


def _scales(place: Place, stored: Mapping[str, Source]) -> list[Source]:
    return [stored[place.scales]] if place.scales else []


def _check_types(tensors: list[StoredTensor], known: tuple[str, ...]) -> None:
    """Raise WeightsError for weights in a type that such ones never have."""
    wrong = [tensor for tensor in tensors if tensor.dtype not in known]
    if wrong:
        described = some(f"{tensor.name} is {tensor.dtype}" for tensor in wrong)
        more = "" if known == (PACKED,) else " Quantised weights are not supported."
        raise WeightsError(
            f"Weights must be of type {', '.join(known)}; {described}.{more}", tuple(tensor.name for tensor in wrong)
        )


def is_spare(name: str, *, tied: bool) -> bool:
    """Whether the weights are complete without a tensor: it follows from the rest, or it is for the KV cache alone.

    tied  the output matrix follows, too
    """
    spare = name.endswith(".rotary_emb.inv_freq") or KV_SCALE.fullmatch(name) is not None
    return spare or (tied and name == OUTPUT)


def hint(missing: Collection[str], *, tied: bool) -> str:
    """A sentence on what to do about tensors that are missing; empty where there is nothing to say."""
    if tied or {EMBEDDING, OUTPUT}.isdisjoint(missing):
        return ""
    return " If the embedding is the output matrix as well, set tie_word_embeddings to true in config.json."


def some(names: list[str] | tuple[str, ...] | Iterator[str]) -> str:
    """The first few of a list of names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more
