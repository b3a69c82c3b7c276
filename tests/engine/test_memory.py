"""How many KV blocks are taken, and how a lack of memory is put."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.engine.config import LayerConfig, ModelConfig, read_model_config
from headrace.engine.errors import MemoryBudgetError, ModelError, ModelNotFoundError, UnsupportedModelError
from headrace.engine.families import FAMILIES
from headrace.engine.load import bf16_is_fast, find_model, fingerprint, load_runner, resolve_device, resolve_dtype
from headrace.engine.memory import CPU_MOST_BYTES, BlockCounts, Footprint, available_bytes, footprint, plan_num_blocks
from headrace.engine.rope import RopeConfig
from headrace.engine.types import EngineConfig
from tests.support.checkpoints import Shape, checkpoint
from tests.support.driver import driver
from tests.support.families import family_checkpoint
from tests.support.torch_rig import backend, rig

MIB = 1 << 20
SIZE = Footprint(weights_bytes=100 * MIB, step_bytes=20 * MIB, block_bytes=MIB)
CONFIG = EngineConfig(max_num_seqs=4, block_size=16, gpu_memory_utilization=0.5)
LLAMA = ModelConfig(
    "LlamaForCausalLM", FAMILIES["LlamaForCausalLM"], 128_256, 4096, 14_336, 32, 8, 128, 131_072, 1e-5,
    (RopeConfig("default", 5e5),), (LayerConfig(),) * 32, False, False, False, False, "bfloat16",
    frozenset(), 128**-0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("available_mib", "max_model_len", "blocks"),
    [
        (1000, 160, 40),  # (500 - 120) / 4 = 95 would fit, but four sequences need 40
        (1000, 1600, 100),  # one sequence needs more than the share
        (1000, 640, 95),  # the share
    ],
)
def test_the_share_between_one_sequence_and_all(available_mib: int, max_model_len: int, blocks: int) -> None:
    assert plan_num_blocks(SIZE, CONFIG, max_model_len, available_mib * MIB) == BlockCounts(blocks)


def test_the_share_is_bounded() -> None:
    huge = replace(CONFIG, max_num_seqs=1000)
    assert plan_num_blocks(SIZE, huge, 16 * 100, 1 << 45) == BlockCounts(CPU_MOST_BYTES // MIB)


@pytest.mark.parametrize(
    ("config", "max_model_len", "available_mib", "words"),
    [
        (CONFIG, 160, 150, "the size of the model"),
        (CONFIG, 160, 230, "max_num_batched_tokens or max_num_seqs"),
        (CONFIG, 16_000, 1000, "one sequence of 16000 tokens .* Lower max_model_len"),
        (replace(CONFIG, num_kv_blocks=400), 160, 1000, "400 KV blocks .* Lower num_kv_blocks"),
    ],
)
def test_too_little_memory_names_the_setting(
    config: EngineConfig, max_model_len: int, available_mib: int, words: str
) -> None:
    with pytest.raises(MemoryBudgetError, match=words) as caught:
        plan_num_blocks(SIZE, config, max_model_len, available_mib * MIB)
    assert caught.value.needed_bytes > caught.value.available_bytes == available_mib * MIB // 2


def test_a_number_of_blocks_that_fits_is_taken() -> None:
    assert plan_num_blocks(SIZE, replace(CONFIG, num_kv_blocks=7), 160, 1000 * MIB) == BlockCounts(7)


# a Gemma 3: five of six layers with a window of 512
MIXED = Footprint(weights_bytes=0, step_bytes=0, block_bytes=MIB, window_block_bytes=5 * MIB, window=512)
ROOM = EngineConfig(max_num_seqs=4, block_size=16, max_num_batched_tokens=512, gpu_memory_utilization=1.0)
CROWD = replace(ROOM, max_num_seqs=64)
SEEN = 33  # blocks that 512 positions may lie in
MOST = 2 * 4 * SEEN + 32


def mib(counts: BlockCounts) -> int:
    return counts.full + 5 * counts.window


def test_layers_with_a_window_get_all_they_can_use_and_the_others_the_rest() -> None:
    counts = plan_num_blocks(MIXED, ROOM, 32_768, 16 << 30)  # a quarter is 4 GiB
    assert counts == BlockCounts(4096 - 5 * MOST, MOST)
    assert counts.full >= 2 * (4096 // 6), "twice the tokens of the same memory with one table for all layers"


def test_until_then_both_kinds_get_as_many() -> None:
    assert plan_num_blocks(MIXED, CROWD, 8192, 16 << 30) == BlockCounts(4096 // 6, 4096 // 6)


def test_one_sequence_as_long_as_can_be_always_fits() -> None:
    tight = plan_num_blocks(MIXED, CROWD, 32_768, 8000 * MIB)
    assert tight == BlockCounts(2048, SEEN + 32)  # more than a quarter, and no more than that one needs
    between = plan_num_blocks(MIXED, CROWD, 32_768, 4 * 2500 * MIB)
    assert between.full == 2048
    assert 2500 - 5 < mib(between) <= 2500
    with pytest.raises(MemoryBudgetError, match="one sequence of 32768 tokens"):
        plan_num_blocks(MIXED, ROOM, 32_768, 2372 * MIB)
    assert plan_num_blocks(MIXED, ROOM, 32_768, 2373 * MIB) == BlockCounts(2048, SEEN + 32)


def test_never_more_than_all_sequences_can_use() -> None:
    assert plan_num_blocks(MIXED, ROOM, 1600, 1 << 40) == BlockCounts(400, MOST)
    assert plan_num_blocks(MIXED, ROOM, 160, 1 << 40) == BlockCounts(40, 40)


def test_a_number_that_is_set_is_that_of_the_layers_that_see_all() -> None:
    assert plan_num_blocks(MIXED, replace(ROOM, num_kv_blocks=3000), 8192, 16 << 30) == BlockCounts(3000, MOST)
    assert plan_num_blocks(MIXED, replace(ROOM, num_kv_blocks=100), 8192, 16 << 30) == BlockCounts(100, 100)
    with pytest.raises(MemoryBudgetError, match="Lower num_kv_blocks"):
        plan_num_blocks(MIXED, replace(ROOM, num_kv_blocks=3000), 8192, (3000 + 5 * MOST - 1) * MIB)


def test_with_a_window_in_every_layer_it_is_what_they_can_use() -> None:
    every = replace(MIXED, block_bytes=0)
    assert plan_num_blocks(every, ROOM, 32_768, 1 << 40) == BlockCounts(0, MOST)
    assert plan_num_blocks(every, CROWD, 32_768, 16 << 30) == BlockCounts(0, 4096 // 5)
    assert plan_num_blocks(every, ROOM, 32_768, 5 * (SEEN + 32) * MIB) == BlockCounts(0, SEEN + 32)
    assert plan_num_blocks(every, replace(ROOM, num_kv_blocks=77), 32_768, 16 << 30) == BlockCounts(0, 77)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "mistral-no-window"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_cache_takes_what_was_planned(name: str, kv_cache_dtype: str) -> None:
    folder = family_checkpoint(name)
    made = rig(folder, max_num_seqs=3, num_kv_blocks=200, kv_cache_dtype=kv_cache_dtype)
    kv_dtype = torch.int8 if kv_cache_dtype == "int8" else torch.float32
    size = footprint(read_model_config(folder), made.config, 0, 4, kv_dtype)
    planned = made.runner.num_blocks * size.block_bytes + made.runner.num_window_blocks * size.window_block_bytes
    assert sum(group.nbytes for group in made.runner._cache.groups) == planned > 0
    assert made.engine.stats().total_blocks == 200


def long_texts_at_once(counts: BlockCounts, window: int) -> int:
    """How many sequences of 1,500 tokens run side by side, with none giving way, in so many blocks."""
    drive = driver(
        counts.full, 16, 8, 512, window=window, num_window_blocks=counts.window, max_model_len=2048, script=[7] * 200
    )
    for number in range(8):
        drive.add(f"{number}", [number] * 1500, max_tokens=40, ignore_eos=True)
    most = 0
    while drive.engine.has_work:
        drive.step()
        most = max(most, drive.engine.stats().running)
    assert drive.engine.stats().preemptions == 0
    drive.assert_as_alone()
    return most


def test_the_same_memory_runs_more_than_twice_as_many_long_texts() -> None:
    """A Gemma 3 with a window of 64, in the memory of 200 blocks of all layers."""
    config = replace(ROOM, max_num_seqs=8)
    counts = plan_num_blocks(replace(MIXED, window=64), config, 2048, 4 * 200 * 6 * MIB)
    assert mib(counts) <= 200 * 6
    assert long_texts_at_once(counts, 64) >= 2 * long_texts_at_once(BlockCounts(200), 0)


def test_scores_and_log_probabilities_of_a_full_batch_are_counted() -> None:
    config = EngineConfig(max_num_seqs=256)
    size = footprint(LLAMA, config, 0, 2, torch.bfloat16)
    assert size.block_bytes == 2 * 32 * 16 * 8 * 128 * 2
    assert footprint(LLAMA, config, 0, 2, torch.int8).block_bytes == 2 * 32 * 16 * 8 * (128 + 4)  # and a scale
    # scores as the product gives them, their float32 copy and the one that penalties change, for every sequence at once
    assert size.step_bytes > 256 * 128_256 * (2 + 4 + 4)
    assert (
        footprint(LLAMA, replace(config, max_num_seqs=512), 0, 2, torch.bfloat16).step_bytes
        > size.step_bytes + 256 * 128_256 * 10 - 1
    )


def test_what_a_full_batch_really_takes_stays_below_the_plan() -> None:
    # every kind of extra memory at once, right after the start
    shape = Shape(vocab=20_000, tied=False)
    made = rig(shape, max_num_seqs=32)
    made.poison = False
    made.runner.on_logits = None
    model = read_model_config(checkpoint(shape))
    planned = footprint(model, made.config, 0, 4, torch.float32).step_bytes
    for number in range(32):
        made.add(
            f"{number}", [5, 6, 7 + number, 8], prompt_logprobs=5, logprobs=5, repetition_penalty=1.2, max_tokens=2
        )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        made.run()
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert 0 < peak <= planned, f"{peak} of {planned} bytes"


def test_available_memory_is_plausible() -> None:
    assert MIB < available_bytes() < 1 << 50


def test_a_context_beyond_the_models_is_refused() -> None:
    folder = checkpoint(Shape())
    with pytest.raises(ModelError, match="max_model_len 513 is more than the 512"):
        load_runner(folder, read_model_config(folder), EngineConfig(max_model_len=513), torch.float32, backend("torch"))


def test_the_type_that_is_computed_in() -> None:
    small = read_model_config(checkpoint(Shape()))
    large_fp16, large_fp32 = replace(LLAMA, dtype="float16"), replace(LLAMA, dtype="float32")
    assert resolve_dtype("auto", LLAMA, fast_bf16=True) == torch.bfloat16
    assert resolve_dtype("auto", LLAMA, fast_bf16=False) == torch.float32
    assert resolve_dtype("auto", replace(small, dtype="bfloat16"), fast_bf16=True) == torch.float32
    assert resolve_dtype("auto", large_fp16, fast_bf16=True) == torch.float32
    assert resolve_dtype("auto", large_fp32, fast_bf16=True) == torch.float32
    assert resolve_dtype("bf16", small, fast_bf16=False) == torch.bfloat16
    assert bf16_is_fast(own_products=True) >= bf16_is_fast(own_products=False)
    with pytest.raises(UnsupportedModelError, match="float16"):
        resolve_dtype("float16", small, fast_bf16=True)


@pytest.mark.parametrize("name", ["fp4", "fp8_e4m3fnuz", "int4"])
def test_kv_types_that_are_not_built_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"kv_cache_dtype '{name}'"):
        rig(Shape(), kv_cache_dtype=name)


def test_a_bfloat16_cache_under_a_float32_model() -> None:
    made = rig(Shape(), kv_cache_dtype="bf16")
    made.add("a", [5, 6, 7])
    made.run()
    assert made.finishes["a", 0].reason == "length"


def test_devices() -> None:
    assert resolve_device("auto").type == resolve_device("cpu").type == "cpu"
    with pytest.raises(UnsupportedModelError, match="'tpu'"):
        resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'cuda' is not there: .*; choose auto or cpu"):
        resolve_device("cuda")


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model directory"):
        find_model(tmp_path / "nothing")
    with pytest.raises(ModelNotFoundError, match="no model directory"):
        find_model("./some/where")
    assert find_model(str(tmp_path)) == tmp_path


def test_the_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    import shutil

    folder = checkpoint(Shape())
    base = fingerprint(folder, torch.float32)
    assert len(base) == 64
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert fingerprint(copy, torch.float32) == base
    assert fingerprint(folder, torch.bfloat16) != base
    for name in ("config.json", "tokenizer.json"):
        text = (copy / name).read_text()
        (copy / name).write_text(text + " ")
        assert fingerprint(copy, torch.float32) != base, name
        (copy / name).write_text(text)
    assert fingerprint(checkpoint(Shape(layers=3)), torch.float32) != base
