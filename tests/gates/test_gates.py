"""Each check of the gates goes red on a kernel that it is against."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from headrace.kernels.gpu import decode, prefill
from headrace.kernels.gpu.ops import triton_backend
from headrace.kernels.gpu.prefill import Tiles
from tests.gates.judge import Done, check, needs, script_faults
from tests.support import kernel_launches, kernel_script
from tests.support.fake_gpu import Compiled, fake_gpu
from tests.support.kernel_budget import Key, Need, largest, over, read_table, write_table
from tests.support.kernel_launches import launches
from tests.support.kernel_limits import buffering, faults, programs
from tests.support.kernel_script import SCRIPTS
from tests.support.mutations import Fault, faulty

CAPABILITY = 90


def compiled(name: str) -> list[Compiled]:
    launch = next(each for each in launches(CAPABILITY) if each.name == name)
    with fake_gpu(CAPABILITY) as seen:
        launch.run()
    return seen


def faults_with(monkeypatch: pytest.MonkeyPatch, tiles: Tiles) -> str:
    """What is wrong with Llama's prefill in other tiles."""
    monkeypatch.setattr(prefill, "tiles", lambda *_: tiles)
    return "\n".join(faults(compiled("Llama-3.1-8B prefill bf16")[-1], CAPABILITY))


def test_more_rows_than_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "registers are spilled" in faults_with(monkeypatch, Tiles(128, 64, 4, 3))


def test_more_keys_than_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shared memory, of which sm_90 has 232448" in faults_with(monkeypatch, Tiles(64, 128, 4, 5))


def test_fewer_programs_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 programs of 4 warps fit an SM, planned are 8 warps" in faults_with(monkeypatch, Tiles(64, 128, 4, 3))


def test_products_of_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no product by wgmma" in faults_with(monkeypatch, Tiles(16, 64, 4, 3))


def test_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages leave one buffer: a tile is copied when the last one is done with."""
    monkeypatch.setattr(decode, "launch_options", lambda *_: {"num_warps": 4, "num_stages": 2})
    one = next(each for each in compiled("Llama-3.1-8B decode bf16") if each.kernel == "_decode")
    assert "0 buffers of two tiles" in "\n".join(faults(one, CAPABILITY))


def test_keys_whose_blocks_are_not_known_a_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: with the load of a block id in the same turn as the loads of its keys, there is one buffer."""
    before = "block = blocks.to(tl.int64)"
    after = "block = tl.load(table + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)"
    with faulty(Fault("split_keys", before, after), "ops") as (ops,):
        monkeypatch.setattr(kernel_launches, "Attending", ops.Attending)
        one = compiled("Llama-3.1-8B decode bf16")[0]
    assert "buffers of two tiles" in "\n".join(buffering(one.ttgir))


def test_a_wait_for_everything() -> None:
    ttgir = compiled("Llama-3.1-8B decode bf16")[0].ttgir
    assert not list(buffering(ttgir))
    assert ttgir.count("{num = 2 : i32}") == 1
    assert "[0]" in "\n".join(buffering(ttgir.replace("{num = 2 : i32}", "{num = 0 : i32}")))
    assert "no loop" in "\n".join(buffering(""))


def test_a_product_that_is_rounded_before_a_sum_is_not_fused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter never fuses, so that only the compiled kernel shows it."""
    assert "fma.rn.f32" not in compiled("Llama-3.1-8B rotate int8")[0].ptx
    with faulty(Fault("rotary", "enable_fp_fusion=False,", ""), "rotary") as (changed,):
        monkeypatch.setattr(kernel_launches, "rotary", changed)
        assert "fma.rn.f32" in compiled("Llama-3.1-8B rotate int8")[0].ptx


def test_programs_of_an_sm() -> None:
    """By hand: 80 registers of 128 threads are 10,240 of 65,536; 37,888 bytes and 1,024 are a sixth of 233,472."""
    one = compiled("Llama-3.1-8B decode bf16")[0]
    one = replace(one, registers=80, shared_bytes=37_888, num_warps=4, tensor_columns=0)
    assert programs(one, 90) == 6
    assert programs(replace(one, registers=128), 90) == 4
    assert programs(replace(one, registers=81), 90) == 5
    assert programs(one, 80) == 4
    assert programs(replace(one, tensor_columns=256), 100) == 2


def test_more_than_the_table_allows(tmp_path: Path) -> None:
    key, allowed = Key("_decode", "Llama-3.1-8B decode bf16", 90), Need(80, 1000)
    table = {key: allowed, Key("_merge", "x", 100): Need(1, 2)}
    write_table(table, tmp_path / "table.toml")
    assert read_table(tmp_path / "table.toml") == table
    assert not over(table, key, allowed)
    assert "81 registers, the table allows 80" in over(table, key, Need(81, 1000))[0]
    assert "1001 bytes" in over(table, key, Need(80, 1001))[0]
    assert "not in the table" in over({}, key, allowed)[0]
    assert largest([(key, Need(80, 9)), (key, Need(70, 10))]) == {key: Need(80, 10)}


def test_a_result_is_judged() -> None:
    one = compiled("Llama-3.1-8B decode bf16")[0]
    answer = {"kernels": [{**asdict(one), "faults": ["is slow"]}]}
    done = Done("3.0", 90, {"launch": "Llama-3.1-8B decode bf16"}, answer, 1.0)
    assert [fault.rpartition("_decode ")[2] for fault in check([done], needs([done]))] == ["is slow"]
    assert len(check([done], {})) == 2
    assert check([Done("3.0", 90, done.task, {"error": "no such thing"}, 1.0)], {}) != []


def test_a_length_among_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of rows that is specialised is compiled for 1, for multiples of 16 and for others, when they come."""
    fault = Fault("rms_norm", '@triton.jit(do_not_specialize=["rows"])', "@triton.jit")
    with faulty(fault, "rms_norm") as (changed,):
        ops = replace(triton_backend(CAPABILITY), rms_norm=changed.rms_norm, add_rms_norm=changed.add_rms_norm)
        monkeypatch.setattr(kernel_script, "triton_backend", lambda _: ops)
        played = asdict(kernel_script.play(SCRIPTS["plain"], steps=24, warm_up=4))
    found = list(script_faults("plain", played))
    assert any("_rms_norm_rows" in each and "after the warm-up" in each for each in found)
    assert any("no preemptions" in each for each in found)
    assert any("at most" in each for each in script_faults("plain", {**played, "binaries": 1000}))


def test_every_kernel_that_is_launched_is_in_the_table() -> None:
    """A kernel of which nobody has made a launch would not be looked at."""
    sources = [file.read_text() for file in Path(prefill.__file__).parent.glob("*.py")]
    launched = {found for source in sources for found in re.findall(r"^ +(\w+)\[.+\]\(", source, re.M)}
    assert launched >= {"_decode", "_prefill", "race_kernel"}
    assert launched == {key.kernel for key in read_table()}
