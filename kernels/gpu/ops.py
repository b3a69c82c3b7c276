"""All operations in Triton, for `backend`.

Products, embeddings and mixtures of experts are torch's: cuBLAS is hard to beat, and no kernel of ours is for them yet.
"""

from __future__ import annotations

import torch

from .. import experts
from ..attention import Paging
from ..backend import Backend
from ..kv_layout import cached_head_dim
from ..linear import any_rows, row_multiple
from . import gated, rms_norm, rotary
from .adjust import adjust
from .block_copy import copy_blocks
from .decode import decode_attention
from .logprobs import logprobs
from .prefill import prefill_attention
from .sample import sample
from .shapes import Attention, Scratch, make_scratch, split_for

NO_GPU = 90  # what kernels are chosen for where there is none
TILE_ROWS = 64  # queries that are packed into a tile of sequences with one prefix


class Attending:
    """Attention with the scratch that it takes, which grows to what is asked for. Used by one thread at a time.

    capability  of the device, 90 for sm_90
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._scratch: Scratch | None = None

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        paging: Paging,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attention.paged_attention`: sequences with one query, then those with more, if there are any.

        How keys are split follows from how many positions a row of the block table has room for, which must not change
        as long as results are to be the same.
        """
        out = torch.zeros_like(query)  # padding rows are nobody's
        how = Attention(scale, window, soft_cap, sinks, kv_scales)
        scratch = self._needed(query, cached_head_dim(k_cache), paging, k_cache.shape[1])
        decode_attention(query, k_cache, v_cache, paging, out, how, scratch)
        if paging.max_queries != 1:
            prefill_attention(query, k_cache, v_cache, paging, out, how, self._capability)
        return out

    def _needed(self, query: torch.Tensor, head_dim: int, paging: Paging, block_size: int) -> Scratch:
        most = paging.block_table.shape[1] * block_size
        shape = (len(paging.kv_len), query.shape[1], -(-most // split_for(most)), head_dim)
        made = self._scratch
        if made is None or made.parts.shape[0] < shape[0] or made.parts.shape[1:] != shape[1:]:
            made = self._scratch = make_scratch(shape[0], shape[1], head_dim, most, query.device)
        return made


def sharing(positions: int, queries_per_kv_head: int) -> tuple[int, int]:
    """Give (positions of a split, sequences of a tile) for block tables with room for so many positions.

    One sequence to a tile says that nothing is gained by sharing.
    """
    return split_for(positions), max(1, TILE_ROWS // queries_per_kv_head)


def device_capability() -> int:
    """The capability of the GPU in use, 90 for sm_90; of none, as under Triton's interpreter, `NO_GPU`."""
    if not torch.cuda.is_available():
        return NO_GPU
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def triton_backend(capability: int | None = None) -> Backend:
    """Our kernels, on a GPU, or by Triton's interpreter on the CPU.

    capability  of the GPU; None asks the one in use
    """
    return Backend(
        name="triton",
        paged_attention=Attending(device_capability() if capability is None else capability).paged_attention,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        add=torch.add,
        rotate_and_store=rotary.rotate_and_store,
        silu_mul=gated.silu_mul,
        gelu_mul=gated.gelu_mul,
        experts=experts.experts,
        sample=sample,
        adjust=adjust,
        logprobs=logprobs,
        copy_blocks=copy_blocks,
        sharing=sharing,
        kv_layout="by_head_rows",
        # cuBLAS chooses by the number of rows how it sums: padding would not give a row the same bits always
        row_multiple=row_multiple if device_capability() == NO_GPU else any_rows,
    )
