"""A worker on the scripted model, as a program of its own: `python -m tests.support.scripted_worker --url …`.

Every field of `WorkerSettings` is an option (`--lease_s 1`), and so is every knob of `ScriptedRunner` that tests turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from headrace.engine.engine import Engine
from headrace.engine.types import EngineConfig, ModelInfo
from headrace.worker.errors import StartupError
from headrace.worker.options import WorkerSettings
from headrace.worker.service import run
from tests.support.scripted import ByteTokenizer, ScriptedRunner


def make_engine(
    *,
    script: str = "hash",
    step_time_s: float = 0.0,
    max_num_seqs: int = 32,
    num_blocks: int = 256,
    max_model_len: int = 512,
    eos_every: int = 24,
    kill_token_id: int | None = None,
) -> Engine:
    """An engine on the scripted model. A prompt that holds `kill_token_id` kills the process, as poison does."""
    runner = _Poisonable if kill_token_id is not None else ScriptedRunner
    made = runner(
        script=script,
        step_time_s=step_time_s,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_every=eos_every,
    )
    if isinstance(made, _Poisonable):
        made.kill_token_id = kill_token_id
    return Engine(made, EngineConfig(max_num_seqs=max_num_seqs))


class _Poisonable(ScriptedRunner):
    kill_token_id: int | None = None

    def run(self, plan):  # type: ignore[no-untyped-def]
        prompts = (row.sequence.token_ids[: row.sequence.num_prompt_tokens] for row in plan.rows)
        if any(self.kill_token_id in prompt for prompt in prompts):
            import os

            os._exit(70)
        return super().run(plan)


MODEL = ModelInfo("scripted", "f" * 64)


def main() -> int:
    """Run to the end; the exit code."""
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(WorkerSettings):
        kind = {"float": float, "int": int, "bool": lambda text: text == "True"}.get(str(field.type), str)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    parser.add_argument("--script", default="hash")
    parser.add_argument("--step_time_s", type=float, default=0.0)
    parser.add_argument("--max_num_seqs", type=int, default=32)
    parser.add_argument("--eos_every", type=int, default=24)
    parser.add_argument("--max_model_len", type=int, default=512)
    parser.add_argument("--num_blocks", type=int, default=256)
    parser.add_argument("--kill_token_id", type=int, default=None)
    parser.add_argument("--fingerprint", default=MODEL.fingerprint)
    options = vars(parser.parse_args())
    names = {field.name for field in dataclasses.fields(WorkerSettings)}
    settings = WorkerSettings(**{name: value for name, value in options.items() if name in names})
    model = ModelInfo(MODEL.name, options.pop("fingerprint"))
    engine = make_engine(**{name: value for name, value in options.items() if name not in names})
    try:
        return run(engine, ByteTokenizer(), model, settings)
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 3


if __name__ == "__main__":
    sys.exit(main())
