"""One part in a process of its own: `python -m benchmarks.gpu_check.part NAME FILE SECONDS [--dry-run]`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

DRY_SPLIT = 32  # positions: what sequences share need not be hundreds of them


def main(name: str, path: str, limit_s: str, *rest: str) -> None:
    """Run it and leave what it finds in the file."""
    dry = rest == ("--dry-run",)
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    from .ground import open_ground
    from .notebook import Notebook

    ground = open_ground(dry)
    if dry:
        from headrace.kernels.gpu import shapes

        shapes.SPLIT = DRY_SPLIT
    part = import_module(f"{__package__}.{name}")
    notes = Notebook(name, part.TITLE, part.HOW, ground, Path(path), float(limit_s))
    notes.save()
    part.find(notes)
    notes.save(ended=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
