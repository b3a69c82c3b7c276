"""Write docs/published_shapes.md: well-known models at their published size, cut to two layers, against transformers.

Called as `python -m scripts.check_published` in a checkout, or with names, to write only their lines anew. A model at
a time: transformers draws its weights, generates and writes a sharded checkpoint into a temporary folder; a process of
its own loads that with our engine and runs the same prompts together. The largest takes about 11 GiB of memory and
7 GiB of disk. Ends with 1 if any model differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.engine.config import read_model_config
from headrace.engine.load import load_runner
from headrace.engine.types import EngineConfig
from headrace.kernels.backend import open_backend
from tests.support.families import draw
from tests.support.published import FULL_SIZES, PUBLISHED
from tests.support.tolerances import INSIDE
from tests.support.torch_rig import TorchRig, prompt

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "published_shapes.md"
TOKENS = 8
LENGTHS = (100, 37)  # of the prompts that run together
LONGER = {"Gemma-3-4B": (1060, 37), "gpt-oss-20b": (300, 37)}  # past their windows
# All of them take 5 to 11 GiB as float32, and transformers needs half as much again to write them.
EXPERTS = {
    "Qwen3-30B-A3B": {"num_experts": 32}, "Mixtral-8x7B": {"num_local_experts": 4}, "gpt-oss-20b":
    {"num_local_experts": 16},
}  # fmt: skip
SHARD = "1GB"
# Of the largest score: what each of two layers and the scoring may round (tests/support/tolerances.py).
ALLOWED = 3 * INSIDE
HEAD = """# Published shapes

Models at the size at which they are published, cut to two layers, with random weights in float32: our engine against
transformers {version}. Written by `scripts/check_published.py`; do not edit.

Hidden and intermediate size, heads and their size, rotary embedding, windows, caps, multipliers and vocabulary are as
published; only the windows of Gemma 3 and gpt-oss are shorter than a prompt. Where a model has two kinds of layers
there is one of each.
{less}

Each checkpoint is written in shards, loaded by a process of its own and runs two prompts of the given lengths together,
{tokens} greedy tokens each; then again with their prefix cached and without anybody looking at the scores, as a worker
runs. *Off* is the largest distance between a score of ours and transformers' own, as a part of the largest score;
{allowed:.1e} is allowed.

| model | hidden, intermediate | heads, KV heads × size | vocabulary | parameters | shards | prompts | tokens | off |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What came of one model."""

    sizes: str
    heads: str
    vocab_size: int
    num_parameters: int
    num_shards: int
    same: bool  # every token of both runs
    off: float  # of the largest score


def config_of(name: str) -> dict[str, Any]:
    """The config.json that is written."""
    return {**PUBLISHED[name], **FULL_SIZES[name], **EXPERTS.get(name, {})}


def prompts_of(name: str) -> list[list[int]]:
    """Ids of each prompt, over the whole vocabulary."""
    spread = FULL_SIZES[name]["vocab_size"] // 320
    return [[each * spread for each in prompt(length, 320, salt=length)] for length in LONGER.get(name, LENGTHS)]


def write_reference(name: str, folder: Path) -> None:
    """Write the checkpoint, and into expected.pt per prompt what transformers generates and scores [TOKENS, vocab]."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.utils import logging

    logging.disable_progress_bar()
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    draw(model)
    expected: list[tuple[list[int], torch.Tensor]] = []
    for ids in prompts_of(name):
        inputs = torch.tensor([ids])
        made = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        with torch.no_grad():
            scores = model(made, logits_to_keep=TOKENS + 1).logits[0, :-1].clone()
        expected.append((made[0, len(ids) :].tolist(), scores))
    torch.save(expected, folder / "expected.pt")
    model.save_pretrained(folder, max_shard_size=SHARD)
    (folder / "config.json").write_text(json.dumps(config_of(name)))  # in the layout of its time


def compare(name: str, folder: Path) -> Row:
    """Run the checkpoint with our engine and compare."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=128, num_kv_blocks=160, max_model_len=2048)
    model = read_model_config(folder)
    runner = load_runner(folder, model, config, torch.float32, open_backend("auto", "cpu", torch.float32))
    made, prompts = TorchRig(runner, config, poison=False), prompts_of(name)
    for number, ids in enumerate(prompts):
        made.add(f"watched {number}", ids, max_tokens=TOKENS)
    made.run()
    runner.on_logits = None
    for number, ids in enumerate(prompts):
        made.add(f"unwatched {number}", ids, max_tokens=TOKENS)
    made.run()
    same, off = True, 0.0
    for number, (tokens, scores) in enumerate(torch.load(folder / "expected.pt", weights_only=True)):
        same &= tokens == made.tokens[f"watched {number}", 0] == made.tokens[f"unwatched {number}", 0]
        distance = (made.scores(f"watched {number}") - scores).abs().max() / scores.abs().max()
        off = max(off, distance.item())
    return Row(
        sizes=f"{model.hidden_size:,}, {model.intermediate_size:,}",
        heads=f"{model.num_heads}, {model.num_kv_heads} × {model.head_dim}",
        vocab_size=model.vocab_size,
        num_parameters=json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"] // 4,
        num_shards=len(list(folder.glob("model-*.safetensors"))),
        same=same,
        off=off,
    )


def check(name: str) -> Row:
    """Run both sides, each in a process of its own; the checkpoint is removed afterwards."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-published-") as folder:
        for part in ("--reference", "--engine"):
            print(f"{name}: {part[2:]}, after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "scripts.check_published", part, name, folder], cwd=ROOT, check=True)
        row = Row(**json.loads((Path(folder) / "row.json").read_text()))
    took_s = time.monotonic() - begun_s
    print(f"{line(name, row)}  ({took_s:.0f} s)", file=sys.stderr, flush=True)
    return row


def line(name: str, row: Row) -> str:
    """The table's line."""
    lengths = ", ".join(f"{length:,}" for length in LONGER.get(name, LENGTHS))
    parameters = f"{row.num_parameters / 1e6:,.0f} M"
    parts = [name, row.sizes, row.heads, f"{row.vocab_size:,}", parameters, str(row.num_shards), lengths]
    parts += ["the same" if row.same else "**others**", f"{row.off:.1e}"]
    return "| " + " | ".join(parts) + " |"


def known_lines() -> dict[str, str]:
    """The table's lines by name, as the page has them."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {name: each for each in lines for name in FULL_SIZES if each.startswith(f"| {name} |")}


def page(lines: dict[str, str]) -> str:
    """The whole page."""
    import transformers

    less = " ".join(
        f"Of {name}'s {FULL_SIZES[name][key]} experts {count} are there, to save memory and time."
        for name, change in EXPERTS.items()
        for key, count in change.items()
    )
    head = HEAD.format(version=transformers.__version__, less=less, tokens=TOKENS, allowed=ALLOWED)
    return head + "".join(lines[name] + "\n" for name in FULL_SIZES if name in lines)


def main(arguments: list[str]) -> int:
    """Check the models named, or all of them; the exit code."""
    torch.set_num_threads(os.cpu_count() or 1)
    if arguments[:1] == ["--reference"]:
        write_reference(arguments[1], Path(arguments[2]))
        return 0
    if arguments[:1] == ["--engine"]:
        row = compare(arguments[1], Path(arguments[2]))
        (Path(arguments[2]) / "row.json").write_text(json.dumps(asdict(row)))
        return 0
    good = True
    for name in arguments or FULL_SIZES:
        row = check(name)
        good &= row.same and row.off <= ALLOWED
        PAGE.write_text(page({**known_lines(), name: line(name, row)}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
