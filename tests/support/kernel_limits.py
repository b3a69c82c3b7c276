"""What a compiled kernel must be like, whatever it computes: reasons why it is not, empty where it is.

Programs on an SM, from what the CUDA programming guide says of each capability (Technical Specifications per Compute
Capability, https://docs.nvidia.com/cuda/cuda-c-programming-guide): 65,536 registers, given to a warp in units of 256;
shared memory, of which each program takes 1,024 bytes more than it asks for; 64 warps; 512 columns of tensor memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.support.fake_gpu import Compiled

# Bytes that one program may have, and that all programs of an SM share.
SHARED_BYTES = {80: (166_912, 167_936), 90: (232_448, 233_472), 100: (232_448, 233_472)}
REGISTERS, MOST_WARPS, TENSOR_COLUMNS, OF_A_PROGRAM = 65_536, 64, 512, 1_024
# Warps of an SM that a kernel is planned for. A decode waits for memory: two programs of four warps cover each other's
# waits, and so do a prefill's products and softmax. Operations on rows want many loads at once.
PLANNED_WARPS = {
    "_decode": 8,
    "_shared_prefix": 8,
    "_prefill": 8,
    "cut_kernel": 16,
    "race_kernel": 24,
    "_rotate_and_store": 24,
}
PLANNED_OTHERWISE = 32
BUFFERED = {"_decode", "_shared_prefix", "_prefill"}
# The instruction for products of bfloat16 that a prefill has: whole tiles in the units made for them.
PREFILL_PRODUCT = {
    80: r"mma\.sync\.aligned\.m16n8k16\S*\.bf16\.bf16",
    90: r"wgmma\.mma_async\S*\.bf16\.bf16",
    100: r"tcgen05\.mma\S*\.kind::f16",
}
_LESSER = {80: "none", 90: r"\bmma\.sync", 100: r"\bmma\.sync|wgmma"}
_LOOP = re.compile(r"^( *)[^\n]*\bscf\.for\b[^\n]*\n(.*?)^\1\}", re.MULTILINE | re.DOTALL)
_PRODUCT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
_ALLOCATED = re.compile(r"(%\w+) = ttg\.local_alloc\s*:\s*\(\) -> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x")
_PART = re.compile(r"(%\w+) = ttg\.memdesc_(?:index|subview) (%\w+)\[")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w#]+, (%\w+)")
_WAIT = re.compile(r"ttg\.async_wait\b[^\n]*?\{num = (\d+)")


def faults(one: Compiled, capability: int) -> list[str]:
    """All reasons but the table's."""
    found = [*_spills(one), *_shared(one, capability), *_programs(one, capability)]
    if one.kernel in BUFFERED:
        found += buffering(one.ttgir)
    if one.kernel == "_prefill":
        found += _products(one, capability)
    return found


def programs(one: Compiled, capability: int) -> int:
    """How many programs fit an SM."""
    of_a_warp = -(-one.registers * 32 // 256) * 256
    fit = [REGISTERS // of_a_warp // one.num_warps, MOST_WARPS // one.num_warps]
    fit.append(SHARED_BYTES[capability][1] // (one.shared_bytes + OF_A_PROGRAM))
    if one.tensor_columns:
        fit.append(TENSOR_COLUMNS // one.tensor_columns)
    return min(fit)


def _spills(one: Compiled) -> Iterator[str]:
    if one.stack_bytes:
        yield f"{one.stack_bytes} bytes of stack: registers are spilled"


def _shared(one: Compiled, capability: int) -> Iterator[str]:
    most = SHARED_BYTES[capability][0]
    if one.shared_bytes > most:
        yield f"{one.shared_bytes} bytes of shared memory, of which sm_{capability} has {most}"


def _programs(one: Compiled, capability: int) -> Iterator[str]:
    planned, fit = PLANNED_WARPS.get(one.kernel, PLANNED_OTHERWISE), programs(one, capability)
    if fit * one.num_warps < planned:
        yield f"{fit} programs of {one.num_warps} warps fit an SM, planned are {planned} warps"


def _products(one: Compiled, capability: int) -> Iterator[str]:
    if not re.search(PREFILL_PRODUCT[capability], one.ptx):
        yield f"no product by {PREFILL_PRODUCT[capability]}"
    if re.search(_LESSER[capability], one.ptx):
        yield f"a product by {_LESSER[capability]}"


def buffering(ttgir: str) -> Iterator[str]:
    """Every innermost loop with products must copy into two buffers of keys and two of values, ahead of the products.

    A copy is waited for while later ones are under way, so the number left outstanding is above 0 at each wait.
    """
    allocated = {name: int(count) for name, count, *_ in _ALLOCATED.findall(ttgir)}
    parts = dict(_PART.findall(ttgir))
    loops = [body for body in _innermost(ttgir) if _PRODUCT.search(body)]
    if not loops:
        yield "no loop with products"
    for body in loops:
        filled = {parts.get(target, target) for target in _COPY.findall(body)} & allocated.keys()
        double = [name for name in filled if allocated[name] >= 2]
        if len(double) < 2:
            yield f"{len(double)} buffers of two tiles in a loop with products, of {len(filled)} that are filled there"
        waits = [int(number) for number in _WAIT.findall(body)]
        if not waits or min(waits) == 0:
            yield f"a loop waits until {waits or 'unknown'} copies are outstanding"


def _innermost(ttgir: str) -> Iterator[str]:
    for match in _LOOP.finditer(ttgir):
        body = match.group(2)
        if "scf.for" in body:
            yield from _innermost(body)
        else:
            yield body
