"""Trains the demo model's tokenizer and weights on a CPU, and writes them as an ordinary checkpoint.

Run as `python -m assets.train_demo` after `python -m assets.make_corpus`. Seeded: the same versions of the libraries
on the same kind of processor give the same model, unless the time limit cuts the run short.
"""

# pyright: reportUnknownMemberType=false
# The libraries leave some signatures untyped.

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from assets.demo_tokenizer import CONTEXT_LENGTH, END_OF_TEXT, TURN_END, train_tokenizer
from assets.initial import prepare
from assets.make_corpus import DEFAULT_OUT
from assets.packing import IGNORED, batches

MODEL_DIR = Path(__file__).parent / "demo-model"
VOCAB_SIZE = 4096
TOKENIZER_DOCUMENTS = 20_000
HELD_OUT = 300
PACKED_SHARE = 0.08
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 100
FINAL_RATE = 0.03
CLIP = 1.0
REPORT_EVERY = 40
EMBEDDING_RATE = 3.0


@dataclass
class Options:
    """What the command line says."""

    corpus: Path
    out: Path
    checkpoint: Path
    steps: int
    minutes: float
    rate: float
    seed: int
    threads: int
    save_minutes: float


def parse_options() -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_OUT.parent / "checkpoint", help="saved on the way")
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--minutes", type=float, default=30.0, help="a limit on the training time")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-minutes", type=float, default=3.0)
    return Options(**vars(parser.parse_args()))


def load_documents(path: Path) -> list[dict[str, Any]]:
    """The corpus as make_corpus wrote it."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def plain_texts(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The text alone, for the tokenizer's merges."""
    for document in documents:
        if "text" in document:
            yield document["text"]
        else:
            yield from (message["content"] for message in document["messages"])


def tokenised(tokenizer: PreTrainedTokenizerFast, documents: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Each document as tokens, with chats in the template's form and an end mark after every document."""
    texts: list[str] = [
        document["text"]
        if "text" in document
        else str(tokenizer.apply_chat_template(document["messages"], tokenize=False))
        for document in documents
    ]
    end = token_id(tokenizer, END_OF_TEXT)
    return [[*encoding.ids, end] for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The number of a token that the vocabulary is known to hold."""
    number = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(number, int):
        raise TypeError(f"{token!r} is not one token")
    return number


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama with grouped-query attention and tied embeddings."""
    end = token_id(tokenizer, END_OF_TEXT)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    prepare(model)
    return model


def loss_of(model: LlamaForCausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy; products in bfloat16, which is the faster half on processors that know it."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def rate_at(progress: float, step: int) -> float:
    """The learning rate's share of its peak: a short warm-up, then a cosine down to a small rest."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices, leaves the norms' gains alone, and moves the larger embeddings in larger steps."""
    embeddings = [model.get_parameter("model.embed_tokens.weight")]
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY, "scale": 1.0},
        {"params": embeddings, "weight_decay": 0.0, "scale": EMBEDDING_RATE},
        {"params": gains, "weight_decay": 0.0, "scale": 1.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def endless(documents: Sequence[list[int]], padding: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Passes over the documents, each in another order."""
    for epoch in itertools.count():
        yield from batches(documents, padding, PACKED_SHARE, seed + epoch)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[list[int]], options: Options
) -> None:
    """The training loop; it reports now and then, and saves on the way, so that an interrupted run is not lost."""
    optimizer = new_optimizer(model)
    source = endless(documents, token_id(tokenizer, END_OF_TEXT), options.seed)
    start = saved = time.monotonic()
    seen, window = 0, list[float]()
    model.train()
    for step, (tokens, targets) in zip(range(options.steps), source, strict=False):
        elapsed = time.monotonic() - start
        progress = max(step / options.steps, elapsed / (60 * options.minutes))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * group["scale"] * rate_at(progress, step)
        loss = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += int((targets != IGNORED).sum())
        window.append(loss.item())
        if step % REPORT_EVERY == REPORT_EVERY - 1:
            report(step + 1, options.steps, window, seen, time.monotonic() - start)
            window.clear()
        if time.monotonic() - saved > 60 * options.save_minutes:
            export(model, tokenizer, options.checkpoint)
            saved = time.monotonic()


def report(step: int, steps: int, window: Sequence[float], seen: int, elapsed: float) -> None:
    """One line of progress."""
    loss = sum(window) / len(window)
    left = elapsed / step * (steps - step)
    print(f"step {step}/{steps}  loss {loss:.4f}  {seen / elapsed:.0f} tokens/s  ETA {left / 60:.1f} min", flush=True)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, documents: Sequence[list[int]], padding: int) -> float:
    """The mean loss per token on documents the training has not seen."""
    total, count = 0.0, 0
    model.eval()
    for tokens, targets in batches(documents, padding, PACKED_SHARE, seed=0):
        known = int((targets != IGNORED).sum())
        total += loss_of(model, tokens, targets).item() * known
        count += known
    return total / count


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the checkpoint in bfloat16, in the layout any Llama loader knows."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.bfloat16()
    ends = [token_id(tokenizer, token) for token in (END_OF_TEXT, TURN_END)]
    copy.generation_config = GenerationConfig(
        bos_token_id=ends[0], eos_token_id=ends, pad_token_id=ends[0], max_length=CONTEXT_LENGTH
    )
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The class name and fields that both older and newer loaders understand.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    """Tokenizer, training, evaluation, export."""
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    documents = load_documents(options.corpus)
    tokenizer = train_tokenizer(plain_texts(documents[:TOKENIZER_DOCUMENTS]), VOCAB_SIZE)
    rows = tokenised(tokenizer, documents)
    padding = token_id(tokenizer, END_OF_TEXT)
    model = new_model(tokenizer)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {sum(map(len, rows)) / 1e6:.2f} M tokens", flush=True)
    start = time.monotonic()
    train(model, tokenizer, rows[HELD_OUT:], options)
    print(f"trained for {(time.monotonic() - start) / 60:.1f} min")
    export(model, tokenizer, options.out)
    final = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    print(f"held-out loss {held_out_loss(final, rows[:HELD_OUT], padding):.4f} (from the bfloat16 weights)")


if __name__ == "__main__":
    main()
