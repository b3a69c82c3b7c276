"""The set of operations for a device, chosen once.

cpu          the compiled C++ library
cpu-onednn   the same, but for products, which are torch's
torch        the plain torch references, on any device
triton       our Triton kernels, and torch for products: on CUDA devices, and for tests, interpreted, on the CPU
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from . import attention, block_copy, experts, gated, rms_norm, rotary
from .adjust import Adjustments
from .adjust import adjust as torch_adjust
from .cpu.build import cpu_features, library_path
from .cpu.library import CpuLibrary
from .cpu.prebuilt import prebuilt_path
from .cpu.recorder import CACHE_TYPES
from .embedding import Asked, Scores
from .embedding import cap_scores as torch_cap_scores
from .embedding import embedding as torch_embedding
from .embedding import score as torch_score
from .errors import BackendError, BuildError
from .forward import Begin, Describe
from .kv_cache import KvCache
from .kv_layout import KvLayout
from .linear import any_rows, row_multiple
from .linear import linear as torch_linear
from .logprobs import logprobs as torch_logprobs
from .matrix import Matrix
from .sample import SampleParameters, sample

CHOICES = ("auto", "cpu", "cpu-onednn", "torch", "triton")
MATRIX_UNITS = {"amx_bf16", "bf16"}  # as x86 and Arm CPUs name what multiplies tiles of bfloat16
logger = logging.getLogger(__name__)


class PagedAttention(Protocol):
    """`attention.paged_attention`, which describes the arguments."""

    def __call__(  # noqa: PLR0913, PLR0917  as the operation has them
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        paging: attention.Paging,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention over paged keys and values."""
        ...


class RotateAndStore(Protocol):
    """`rotary.rotate_and_store`, which describes the arguments."""

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        norm: rotary.QueryKeyNorm | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values."""
        ...


class Linear(Protocol):
    """`linear.linear`, which describes the arguments."""

    def __call__(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """Product."""
        ...


class Embedding(Protocol):
    """`embedding.embedding`, which describes the arguments."""

    def __call__(self, token_ids: torch.Tensor, table: Matrix, scale: float = 1.0) -> torch.Tensor:
        """Rows of a table."""
        ...


class Record(Protocol):
    """`cpu.program.record` without its first argument."""

    def __call__(
        self,
        describe: Describe,
        cache: KvCache,
        tables: Sequence[torch.Tensor],
        max_rows: int,
        dtype: torch.dtype,
    ) -> Begin:
        """Record a forward pass."""
        ...


Tensor = torch.Tensor


def _no_bytes(outputs: int, inputs: int) -> int:
    del outputs, inputs
    return 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Operations, each described in the file of its name, and what goes with them."""

    name: str
    paged_attention: PagedAttention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add: Callable[[Tensor, Tensor], Tensor]
    rotate_and_store: RotateAndStore
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    experts: Callable[[Tensor, Tensor, experts.Mixture], Tensor]
    sample: Callable[[Tensor, SampleParameters], Tensor]
    adjust: Callable[[Tensor, Adjustments], None] = torch_adjust
    logprobs: Callable[[Tensor, Sequence[int], Tensor, Sequence[int]], Tensor] = torch_logprobs
    linear: Linear = torch_linear
    embedding: Embedding = torch_embedding
    score: Callable[[Tensor, Asked], Scores] = torch_score
    cap_scores: Callable[[Tensor, float, float], None] = torch_cap_scores
    pack: Callable[[Matrix], Matrix] | None = None  # bring a matrix into the form that products read, once, in place
    compressed: Callable[[Matrix], Matrix] | None = None  # a packed matrix that is for `linear` alone, in less memory
    screened: Callable[[Matrix], Matrix] | None = None  # add to a packed matrix what `score` finds the best with
    screen_bytes: Callable[[int, int], int] = _no_bytes  # memory of that for [outputs, inputs]
    record: Record | None = None  # make one call of a forward pass; None: operation by operation
    copy_blocks: Callable[[Tensor, Sequence[tuple[int, int]]], None] = block_copy.copy_blocks
    # of positions that a sequence may have, and query heads of a KV head: `SharedPrefix`'s split, sequences of a tile
    sharing: Callable[[int, int], tuple[int, int]] | None = None
    cache_types: tuple[torch.dtype, ...] = ()  # that it can write and read; empty: all of them
    kv_layout: KvLayout = "by_position"  # of the cache that `rotate_and_store` writes and `paged_attention` reads
    row_multiple: Callable[[Matrix], int] = row_multiple  # what to pad rows to, so that neighbours change no bit
    reason: str = ""  # why "auto" did not choose the compiled library


def torch_backend(reason: str = "") -> Backend:
    """Plain torch for everything."""
    return Backend(
        name="torch",
        paged_attention=attention.paged_attention,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        add=rms_norm.add,
        rotate_and_store=rotary.rotate_and_store,
        silu_mul=gated.silu_mul,
        gelu_mul=gated.gelu_mul,
        experts=experts.experts,
        sample=sample,
        reason=reason,
    )


def cpu_backend(library: CpuLibrary, own_products: bool = True) -> Backend:
    """The compiled library for everything, or for everything but products."""
    made = Backend(
        name="cpu" if own_products else "cpu-onednn",
        paged_attention=library.paged_attention,
        rms_norm=library.rms_norm,
        add_rms_norm=library.add_rms_norm,
        add=library.add,
        rotate_and_store=library.rotate_and_store,
        silu_mul=library.silu_mul,
        gelu_mul=library.gelu_mul,
        experts=library.experts if own_products else experts.experts,
        sample=library.sample,
        cap_scores=library.cap_scores,
        cache_types=CACHE_TYPES,
        kv_layout="by_head",
    )
    if not own_products:
        return made
    return replace(
        made,
        linear=library.linear,
        embedding=library.embedding,
        score=library.score,
        pack=library.pack,
        compressed=library.compressed,
        screened=library.screened,
        screen_bytes=library.screen_bytes,
        record=library.record,
        row_multiple=any_rows,
    )


def choose_backend(name: str, device: str, library: CpuLibrary | BuildError, has_matrix_unit: bool = False) -> Backend:
    """Choose by name and device type; `library` is the compiled library, or why there is none.

    "auto" takes the compiled library on the CPU, with torch's products where the CPU has a unit for whole tiles of a
    product that only those use (`has_matrix_unit`), and torch where there is no library. What is asked for by name is
    given or refused, never replaced.

    Raises:
        BackendError: no such name, or not on this device.
        BuildError: the library was asked for, and there is none.
    """
    if name not in CHOICES:
        raise BackendError(f"There is no backend {name!r}; choose one of {', '.join(CHOICES)}.", CHOICES)
    if name == "torch":
        return torch_backend()
    if name == "triton" or (name == "auto" and device == "cuda"):
        return _triton(device)
    if device != "cpu":
        choices = ("auto", "triton", "torch")
        raise BackendError(
            f"The backend {name!r} does not run on {device}; there, choose one of {', '.join(choices)}.", choices
        )
    if isinstance(library, CpuLibrary):
        return cpu_backend(library, own_products=name == "cpu" or (name == "auto" and not has_matrix_unit))
    if name != "auto":
        raise library
    return torch_backend(reason=str(library))


def _triton(device: str) -> Backend:
    """The Triton kernels, which are loaded only where they are wanted."""
    try:
        from triton import knobs

        from .gpu.ops import triton_backend
    except ImportError as error:
        raise BackendError(f"The backend 'triton' cannot be loaded: {error}. Install triton.", ("torch",)) from error
    if device != "cuda" and not knobs.runtime.interpret:
        raise BackendError(
            f"The backend 'triton' does not run on {device}, other than by Triton's interpreter (TRITON_INTERPRET=1), "
            "for tests; choose auto.",
            ("auto",),
        )
    return triton_backend()


def open_backend(name: str, device: str, dtype: torch.dtype = torch.float32) -> Backend:
    """Build or load what `choose_backend` needs, choose, and say in the log if the slow way was taken.

    dtype is that of weights and activations.
    """
    library = open_library() if name != "torch" and device == "cpu" else BuildError("not built")
    has_matrix_unit = dtype == torch.bfloat16 and not MATRIX_UNITS.isdisjoint(cpu_features().split())
    backend = choose_backend(name, device, library, has_matrix_unit)
    if backend.reason:
        logger.warning("CPU kernels in plain torch, which is much slower: %s", backend.reason)
    return backend


def for_cache(backend: Backend, dtype: torch.dtype) -> Backend:
    """Give the backend for a KV cache of this type, and say in the log where that makes it slow.

    What has no such cache touches it in plain torch; its other operations stay as they are, done one by one.
    """
    if not backend.cache_types or dtype in backend.cache_types:
        return backend
    name = str(dtype).removeprefix("torch.")
    logger.warning("Attention over a KV cache of %s runs in plain torch here, which is much slower.", name)
    return replace(
        backend,
        paged_attention=attention.paged_attention,
        rotate_and_store=rotary.rotate_and_store,
        record=None,
        cache_types=(),
        kv_layout="by_position",
    )


def open_library() -> CpuLibrary | BuildError:
    """Load the CPU library: one that came with the package, or the cache's, compiled first if need be.

    Gives the error where that fails.
    """
    try:
        return CpuLibrary(prebuilt_path() or library_path())
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"the compiled library cannot be loaded: {error}")
