"""A checkpoint to damage, and how a folder that means harm is to be refused."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import ModelError
from headrace.engine.load import load_engine
from headrace.engine.types import EngineConfig

from .checkpoints import Shape, checkpoint

CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, num_kv_blocks=32, max_model_len=64)


@pytest.fixture(name="folder")
def damageable_folder(tmp_path: Path) -> Path:
    """A checkpoint of one's own, to damage."""
    return Path(shutil.copytree(checkpoint(Shape()), tmp_path / "model"))


def edit(path: Path, **values: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(folder: Path, words: str) -> ModelError:
    """Loading fails with one line that has these words, and takes less than 200 MB more than before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=words) as caught:
        load_engine(folder, CONFIG)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert "\n" not in str(caught.value)
    return caught.value
