"""Requests through Redis and a real worker process give the tokens that transformers' own `generate` gives."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from headrace.clients import Client
from tests.support.demo_worker import DEMO_MODEL, DemoWorker, demo_worker
from tests.support.server import Server

STARTS = (
    "한국의 수도는", "The capital of France is", "Once upon a time", "Once upon a time, a small fox", "옛날 옛적에",
    "Question: What color is the sky?\nAnswer:", "The opposite of hot is", "A story about a lighthouse and a cat.",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    prompt_token_ids: list[int]
    max_tokens: int
    expected: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """32 prompts of 3 to 200 tokens, each with the output that transformers alone gives, greedy, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    model.generation_config.max_length = None  # each call says its own
    rnd, made = random.Random(7), list[Case]()
    for number in range(32):
        ids = tokenizer.encode(STARTS[number % len(STARTS)], add_special_tokens=True)
        length = rnd.randrange(0, 180)
        if number >= len(STARTS):  # longer ones: the model's own story goes on from a longer and longer beginning
            ids = model.generate(torch.tensor([ids]), max_new_tokens=length + 1, do_sample=False)[0].tolist()
            ids = [i for i in ids if i not in model.generation_config.eos_token_id] or ids
        max_tokens = rnd.randrange(4, 48)
        out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)[0].tolist()
        made.append(Case(ids, max_tokens, out[len(ids) :]))
    assert max(len(case.prompt_token_ids) for case in made) > 100
    return made


def send_all(server: Server, worker: DemoWorker, cases: list[Case]) -> list[list[int]]:
    """Queue every case at once, then read every stream to its end."""
    with redis.Redis.from_url(server.url) as raw, Client(server.url, queue=worker.queue) as client:
        for number, case in enumerate(cases):
            body = {"prompt_token_ids": case.prompt_token_ids, "max_tokens": case.max_tokens, "temperature": 0}
            entry = {"id": f"{worker.queue}-{number}", "json": json.dumps(body)}
            raw.xadd(f"headrace:{{{worker.queue}}}:jobs", entry)
        results = [client.result(f"{worker.queue}-{number}", timeout_s=120) for number in range(len(cases))]
    return [list(result.choices[0].token_ids) for result in results]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 32])
@pytest.mark.parametrize(("max_num_batched_tokens", "block_size"), [(16, 16), (64, 8), (512, 32)])
def test_greedy_tokens_are_those_of_transformers(
    server: Server, tmp_path: Path, cases: list[Case], max_num_seqs: int, max_num_batched_tokens: int, block_size: int
) -> None:
    flags = {
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--block-size": block_size,
        "--dtype": "float32",
    }
    with demo_worker(server, tmp_path, flags) as worker:
        got = send_all(server, worker, cases)
    for number, (case, tokens) in enumerate(zip(cases, got, strict=True)):
        assert tokens == case.expected, f"request {number}"
