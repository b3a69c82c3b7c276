"""`python -m benchmarks.gpu_check`: check and measure on the GPU of this machine, and write a report.

Exit code 0: all is right; 1: something is not, as the report says; 2: there is no GPU that can be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.engine.threads import available_cores

from .. import report
from ..machine import read_machine
from ..processes import ROOT
from .notebook import Found
from .parts import PARTS, run_parts

EXIT_OK, EXIT_WRONG, EXIT_NO_GPU = 0, 1, 2
REPORT = "gpu_check"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked for; give the exit code."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Check and measure on a GPU.")
    parser.add_argument(
        "--dry-run", action="store_true", help="everything, tiny, in Triton's interpreter: no GPU needed"
    )
    parser.add_argument("--only", default="", help=f"some of: {' '.join(names)}")
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    given = parser.parse_args(arguments)
    asked = given.only.replace(",", " ").split() or names
    if unknown := [name for name in asked if name not in names]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(names)}")
    gpu = describe_gpu(given.dry_run)
    if not gpu:
        print("There is no NVIDIA GPU that this Python's torch can use; --dry-run needs none.", file=sys.stderr)
        return EXIT_NO_GPU
    begun_s = time.monotonic()
    found = run_parts([part for part in PARTS if part.name in asked], given.dry_run, available_cores())
    folder = given.out or ROOT / "benchmarks" / "results" / _folder(gpu["GPU"], given.dry_run)
    print(write(found, gpu, folder, given.dry_run, time.monotonic() - begun_s))
    failed = [each for one in found.values() for each in one.failed]
    print("\n".join([f"{len(failed)} went wrong:", *failed]) if failed else "nothing went wrong")
    return EXIT_WRONG if failed else EXIT_OK


def describe_gpu(dry: bool) -> dict[str, str]:
    """What there is to say of the GPU and of what drives it; empty if there is none and it is no dry run."""
    import torch
    import triton

    any_torch: Any = torch
    any_triton: Any = triton
    if dry:
        found = {"GPU": "none: a dry run"}
    elif any_torch.cuda.is_available():
        of = any_torch.cuda.get_device_properties(0)
        kind = f"sm_{of.major}{of.minor}, {of.multi_processor_count} multiprocessors"
        found = {"GPU": str(of.name), "capability": kind, "memory": f"{of.total_memory / 2**30:.0f} GiB"}
    else:
        return {}
    versions = {"torch": torch.__version__, "CUDA": any_torch.version.cuda, "Triton": any_triton.__version__}
    return {**found, **{name: str(number) for name, number in versions.items()}}


def _folder(gpu: str, dry: bool) -> str:
    slug = "dry-run-quick" if dry else re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return f"{datetime.now(UTC):%Y-%m-%d}-{slug}"


def write(found: dict[str, Found], gpu: dict[str, str], folder: Path, dry: bool, seconds: float) -> Path:
    """Write the report; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    machine, date = read_machine(), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    sections = [one.section for one in found.values()]
    intro = ["; ".join(f"{name}: {value}" for name, value in gpu.items())]
    intro += [f"{len(found)} parts in {seconds:.0f} s"] if not dry else ["A dry run: no GPU, and nothing is measured"]
    if find_spec("matplotlib") is None:
        sections = [dataclasses.replace(section, plots=()) for section in sections]
        intro.append("No pictures: matplotlib is not installed")
    failed = [each for one in found.values() for each in one.failed]
    intro.append(f"**{len(failed)} went wrong:** {'; '.join(failed)}" if failed else "Nothing went wrong")
    records = [report.Record(section, machine, date, dry, ()) for section in sections]
    path = folder / f"{REPORT}.md"
    path.write_text(report.render(records, folder, "GPU check", intro, f"{REPORT}.json"))
    kept = {name: {"failed": one.failed, "section": dataclasses.asdict(one.section)} for name, one in found.items()}
    (folder / f"{REPORT}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
