"""Every address that decode and prefill touch, watched by compute-sanitizer, where that is installed.

python -m benchmarks.gpu_check.memcheck      what is watched: one decode and one prefill, small
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from headrace.kernels.gpu.decode import decode_attention
from headrace.kernels.gpu.prefill import prefill_attention
from headrace.kernels.gpu.shapes import make_scratch
from tests.support.paged_cases import make_case

from .afar import how_on, on_device
from .ground import open_ground
from .notebook import Notebook

TITLE = "Memory, as compute-sanitizer sees it"
HOW = "A small decode and a small prefill in a process of their own under `compute-sanitizer --tool memcheck`."
TOOL, LIMIT_S = "compute-sanitizer", 40.0
PLACES = ("/usr/local/cuda/bin",)
CLEAN, RIGHT = "ERROR SUMMARY: 0 errors", "right"


def find(notes: Notebook) -> None:
    """Watch, if there is something to watch with."""
    tool = shutil.which(TOOL) or next((str(Path(each) / TOOL) for each in PLACES if (Path(each) / TOOL).exists()), None)
    if notes.ground.dry:
        notes.check("the same without it", lambda: watched([], LIMIT_S, RIGHT))
    elif tool is None:
        notes.note(f"There is no {TOOL} here: memory was not watched")
    else:
        notes.check("memcheck", lambda: watched([tool, "--tool", "memcheck"], LIMIT_S, CLEAN))


def watched(tool: list[str], limit_s: float, clean: str) -> str:
    """Run `tiny` under a tool that says `clean` if all is well. Raises RuntimeError where it does not.

    A tool that cannot work on this machine says so without a word of memory; that is a remark and no failure.
    """
    command = [*tool, sys.executable, "-m", "benchmarks.gpu_check.memcheck"]
    # each tensor's memory is the driver's own, so that its end is seen
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:g} s: nothing is known"
    said = done.stdout + done.stderr
    if clean in said and done.returncode == 0:
        return clean
    if "Device not supported" in said:
        return "the tool does not work on this machine: nothing is known"
    raise RuntimeError(f"exit code {done.returncode}: {said[-600:]}")


def tiny(device: torch.device) -> str:
    """One decode and one prefill."""
    case = make_case([(65, 1), (150, 9), (3, 1)], heads=2, kv_heads=1, head_dim=80, dtype=torch.bfloat16)
    there, how = on_device(case, device), how_on(case, case.how(), device)
    out = there.empty_out()
    inputs = there.query, there.k_cache, there.v_cache, there.paging, out, how
    decode_attention(*inputs, make_scratch(4, 2, 80, 512, device))
    prefill_attention(*inputs)
    case.check(out.cpu(), case.how(), case.rows_of())
    return RIGHT


if __name__ == "__main__":
    print(tiny(open_ground(dry=not torch.cuda.is_available()).device))
