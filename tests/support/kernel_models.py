"""Models whose shapes the kernels are compiled for, as their configurations on the Hugging Face hub have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.rotary import QueryKeyNorm


@dataclass(frozen=True, slots=True)
class KernelModel:
    """What of a model the kernels' constants depend on."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    middle: int  # width of the feed-forward layer
    vocab: int
    windows: tuple[int, ...] = (0,)  # that layers have; 0 sees all
    soft_cap: float = 0.0  # of attention's scores
    gelu: bool = False
    norms: bool = False  # of each head of queries and keys

    def query_key_norm(self) -> QueryKeyNorm | None:
        """Weights of those norms."""
        return QueryKeyNorm(torch.ones(self.head_dim), torch.ones(self.head_dim), 1e-6) if self.norms else None


MODELS = (
    KernelModel("Llama-3.1-8B", 32, 8, 128, 4096, 14336, 128256),
    KernelModel("Qwen2.5-7B", 28, 4, 128, 3584, 18944, 152064),
    KernelModel("Qwen3-0.6B", 16, 8, 128, 1024, 3072, 151936, norms=True),
    KernelModel("Gemma-2-9B", 16, 8, 256, 3584, 14336, 256000, (0, 4096), soft_cap=50.0, gelu=True),
    KernelModel("Phi-3-mini", 32, 32, 96, 3072, 8192, 32064, (2047,)),
)
CACHES = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
FIRST_WITH_E4M3 = 89  # sm_89; Triton refuses the type for older GPUs


def caches_for(capability: int) -> dict[str, torch.dtype]:
    """The types of a KV cache that kernels for sm_`capability` can have."""
    return {name: dtype for name, dtype in CACHES.items() if name != "e4m3" or capability >= FIRST_WITH_E4M3}
