"""How much memory loading a checkpoint takes at its peak: 1.15 times the checkpoint's size at most.

    python -m benchmarks.load_memory --shape 7b --folder DIR

A checkpoint of random bfloat16 weights is written in shards into a temporary folder below DIR, and loaded in a process
of its own, with all that `headrace worker` does to weights on this machine. One line of JSON comes out. What the
interpreter and torch take by themselves is read before the load and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .processes import fresh, print_result

MOST_RATIO = 1.15
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A decoder with as many key-value heads as query heads, and an output matrix of its own."""

    hidden: int
    middle: int
    layers: int
    vocab: int
    shards: int
    head_dim: int = 128

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Names within a layer, and shapes."""
        square, wide = (self.hidden, self.hidden), (self.middle, self.hidden)
        return {
            **{f"self_attn.{name}_proj.weight": square for name in "qkvo"},
            "mlp.gate_proj.weight": wide,
            "mlp.up_proj.weight": wide,
            "mlp.down_proj.weight": (self.hidden, self.middle),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Each tensor's name, the name of what it is filled with (layers are all alike), and its shape."""
        table = (self.vocab, self.hidden)
        yield "model.embed_tokens.weight", "table", table
        for number in range(self.layers):
            for name, shape in self.layer().items():
                yield f"model.layers.{number}.{name}", name, shape
        yield "model.norm.weight", "norm", (self.hidden,)
        yield "lm_head.weight", "table", table


SHAPES = {
    "small": LoadShape(1024, 2816, 8, 8192, 3),
    "1.5gb": LoadShape(2048, 5504, 14, 16_384, 3),
    "7b": LoadShape(4096, 11_008, 32, 32_000, 5),
}


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One load, in bytes."""

    weights: int  # of the checkpoint's tensors
    base: int  # resident before the load
    peak: int  # most that was resident
    seconds: float
    backend: str
    compressed: bool

    @property
    def ratio(self) -> float:
        """What the load took at its peak, of the checkpoint's size."""
        return (self.peak - self.base) / self.weights


def write_checkpoint(shape: LoadShape, folder: Path) -> int:
    """Write config.json, shards and their index; give the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "intermediate_size": shape.middle, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // shape.head_dim, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "num_key_value_heads": shape.hidden // shape.head_dim, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(shape.tensors())
    total = sum(_num_bytes(dims) for _, _, dims in tensors)
    weight_map: dict[str, str] = {}
    fillings: dict[str, bytes] = {}
    for number in range(shape.shards):
        name = f"model-{number + 1:05}-of-{shape.shards:05}.safetensors"
        part: list[tuple[str, str, tuple[int, ...]]] = []
        size = 0
        while tensors and (size < total / shape.shards or number + 1 == shape.shards):
            part.append(tensors.pop(0))
            size += _num_bytes(part[-1][2])
        _write_shard(folder / name, part, fillings)
        weight_map.update(dict.fromkeys((each[0] for each in part), name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def _write_shard(path: Path, part: Sequence[tuple[str, str, tuple[int, ...]]], fillings: dict[str, bytes]) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, _, shape in part:
        begin, end = end, end + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, filling, shape in part:
            if filling not in fillings:
                fillings[filling] = _random(shape)
            file.write(fillings[filling])


def _random(shape: tuple[int, ...]) -> bytes:
    import torch

    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * shape[-1] ** -0.5
    return values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def _num_bytes(shape: tuple[int, ...]) -> int:
    count = _BF16_BYTES
    for size in shape:
        count *= size
    return count


def load(folder: Path, weights: int) -> LoadRun:
    """Load in this process, which should have loaded nothing before."""
    import torch

    from headrace.engine.config import read_model_config
    from headrace.engine.load import load_runner
    from headrace.engine.passes import DecoderPasses
    from headrace.engine.types import EngineConfig
    from headrace.kernels.backend import open_backend

    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=16, num_kv_blocks=16, max_model_len=128)
    backend = open_backend("auto", "cpu", torch.bfloat16)
    model = read_model_config(folder)  # brings in transformers
    base = _status("VmRSS")
    begun_s = time.monotonic()
    runner = load_runner(folder, model, config, torch.bfloat16, backend)
    seconds = time.monotonic() - begun_s
    passes = runner.model
    compressed = isinstance(passes, DecoderPasses) and passes.weights.layers[0].qkv.compressed
    return LoadRun(weights, base, _status("VmHWM"), round(seconds, 1), backend.name, compressed)


def _status(field: str) -> int:
    """A field of /proc/self/status that is in kB, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(shape: str, below: Path | None = None) -> LoadRun:
    """Write a checkpoint and load it in a fresh process. Raises RunError if that fails."""
    with tempfile.TemporaryDirectory(prefix="headrace-load-", dir=below) as folder:
        weights = write_checkpoint(SHAPES[shape], Path(folder))
        return fresh(LoadRun, "benchmarks.load_memory", "--load", folder, "--bytes", weights)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one shape; 1 if it took more than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_memory")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5gb")
    parser.add_argument("--folder", type=Path, default=None, help="where there is room for the checkpoint")
    parser.add_argument("--load", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.load:
        print_result(load(given.load, given.bytes))
        return 0
    run = measure(given.shape, given.folder)
    print(json.dumps({**asdict(run), "ratio": round(run.ratio, 3)}))
    return 0 if run.ratio <= MOST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
