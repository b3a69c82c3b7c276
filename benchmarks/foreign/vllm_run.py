"""Runs a workload on vLLM offline, once for each line of input. For an interpreter that has vLLM.

    python vllm_run.py MODEL_DIR WORK.json

WORK.json holds `warm_up` and `work` as lists of [prompt ids, tokens to generate], `max_num_seqs`, and `num_first`: how
many requests are run one after the other first, for one token each. A line of JSON is printed when it is warm, and
after each run.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def cpu_seconds() -> float:
    """User and system seconds of this process and all its descendants, ended ones included once they are waited for."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
    family = {os.getpid()}
    grown = True
    while grown:
        grown = False
        for pid, fields in stats.items():
            if pid not in family and int(fields[1]) in family:
                family.add(pid)
                grown = True
    ticks = sum(int(ticks) for pid in family for ticks in stats[pid][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def load(model: str, given: dict[str, Any], vllm: Any) -> Any:
    """Load and compile."""
    longest = max(len(prompt) + count for prompt, count in given["work"])
    return vllm.LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=max(2048, longest + 1),
        max_num_seqs=given["max_num_seqs"],
        enable_prefix_caching=True,
    )


def main() -> None:
    """Load, warm up, run."""
    model, path = sys.argv[1:3]
    given: dict[str, Any] = json.loads(Path(path).read_text())
    vllm: Any = importlib.import_module("vllm")
    llm = load(model, given, vllm)

    def run(work: list[Any]) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        options = [vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for _, count in work]
        return sum(len(each.outputs[0].token_ids) for each in llm.generate(prompts, options, use_tqdm=False))

    def measure() -> dict[str, Any]:
        llm.reset_prefix_cache()
        first_token_s: list[float] = []
        for prompt, _ in given["work"][: given["num_first"]]:
            begun_s = time.perf_counter()
            run([[prompt, 1]])
            first_token_s.append(time.perf_counter() - begun_s)
        cpu_before_s, begun_s = cpu_seconds(), time.perf_counter()
        tokens_out = run(given["work"])
        return {
            "version": vllm.__version__,
            "wall_s": time.perf_counter() - begun_s,
            "cpu_s": cpu_seconds() - cpu_before_s,
            "tokens_in": sum(len(prompt) for prompt, _ in given["work"]),
            "tokens_out": tokens_out,
            "first_token_s": first_token_s,
        }

    run(given["warm_up"])
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


if __name__ == "__main__":
    main()
