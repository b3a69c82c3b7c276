"""Where a model's files are, a folder or the hub, and what tells one model from another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from .checkpoint import tensor_shapes, weight_files
from .errors import ModelError, ModelNotFoundError
from .json_file import find_folder
from .model_folder import check_index, decisive_files

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,199}")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_NOT_OF_US = ("consolidated*", "*/*.safetensors", "*/*.model", "onnx/*", "original/*")  # the same weights once more


def find_model(model: str | Path, revision: str | None = None) -> Path:
    """Give the directory of a model; a name on the hub (owner/name) that is no directory is downloaded.

    revision  branch, tag or commit on the hub; None is its main branch

    What the local cache holds is used without the network where that is down or HF_HUB_OFFLINE is set. Raises
    ModelNotFoundError, which says what to do.
    """
    path = find_folder(model)
    if path is not None:
        if revision is not None:
            raise ModelError(f"{path} is a directory and has no revisions; leave out revision {revision!r}.")
        return path
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(f"There is no model directory {model}.")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ModelNotFoundError(f"{revision!r} is no revision; it must be a branch, a tag or a commit of {model}.")
    try:
        return _download(model, revision)
    except Exception as error:  # the errors of a network have no common class
        raise _not_found(model, revision, error) from error


def _download(model: str, revision: str | None) -> Path:
    """Bring a model into the local cache; what is there already is used where the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import errors

    hub: Any = huggingface_hub
    wanted = {"revision": revision, "allow_patterns": list(_HUB_FILES), "ignore_patterns": list(_NOT_OF_US)}
    try:
        return Path(hub.snapshot_download(model, **wanted))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.IncompleteSnapshotError):
        raise  # the answer is certain; GatedRepoError is a RepositoryNotFoundError
    except Exception:  # the library itself looks into the cache for some errors of a network only
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            return Path(hub.snapshot_download(model, **wanted, local_files_only=True))
        raise


def _not_found(model: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    """Say in one line why a model cannot be had from the hub, and what to do about it."""
    from huggingface_hub import constants, errors

    at = f"{model} at revision {revision}" if revision else model
    download = f"hf download {model}" + (f" --revision {revision}" if revision else "")
    if isinstance(error, errors.GatedRepoError):
        why = f"{at} is given to those only who accepted its terms on the hub; accept them, then run: hf auth login"
    elif isinstance(error, errors.RevisionNotFoundError):
        why = f"{model} has no revision {revision}; name a branch, a tag or a commit of it"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = f"There is no model {model} on the hub, or it is private: check the name, or run: hf auth login"
    elif isinstance(error, errors.IncompleteSnapshotError):
        why = f"The local cache holds only a part of {at}; where there is a network, run: {download}"
    elif constants.HF_HUB_OFFLINE:
        why = (
            f"{at} is not in the local cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to ask the hub; "
            f"unset it, or name a directory, or where there is a network, run: {download}"
        )
    else:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        why = (
            f"{at} is no directory and not in the local cache {constants.HF_HUB_CACHE}, and cannot be had from the "
            f"hub; name a directory, or where there is a network, run: {download} ({said})"
        )
    return ModelNotFoundError(why + ".")


def fingerprint(model_dir: Path, dtype: torch.dtype, choices: str = "") -> str:
    """SHA-256, in hex, of what decides a model's output.

    That is its configuration, its tokenizer, names, shapes and sizes of the weights, the type they are computed in, and
    `choices` that were made besides, such as `ModelConfig.choices`.
    The weights' own bytes are left out: reading them all would take as long as loading. Raises WeightsError where the
    weights' headers or their index are damaged, ModelError where another file cannot be read.
    """
    try:
        return _digest(model_dir, f"{dtype}{choices}")
    except OSError as error:
        raise ModelError(f"{model_dir} cannot be read: {error}.") from error


def _digest(model_dir: Path, computed: str) -> str:
    digest = hashlib.sha256(computed.encode())
    for path in decisive_files(model_dir):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(model_dir)}:{len(content)}:".encode() + content)
    for path in weight_files(model_dir):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
    shapes = tensor_shapes(model_dir)
    check_index(model_dir, shapes)
    digest.update(json.dumps(sorted(shapes.items())).encode())
    return digest.hexdigest()
