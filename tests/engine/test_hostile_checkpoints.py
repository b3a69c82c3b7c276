"""Folders that mean harm, or are no models: each is one clear error of ours, soon and without much memory."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.errors import UnsupportedModelError, WeightsError
from headrace.engine.load import load_engine, load_runner, read_config
from headrace.engine.models.shrink import shrunk
from tests.support.foreign_families import family_checkpoint, family_config
from tests.support.hostile import CONFIG, damageable_folder, edit, refused
from tests.support.torch_rig import backend

__all__ = ["damageable_folder"]  # a fixture


def test_the_folder_is_taken_before_it_is_damaged(folder: Path) -> None:
    load_engine(folder, CONFIG)


FOREIGN: list[tuple[str, Callable[[Path], object], str, str]] = [
    (
        "code in config.json",
        lambda at: edit(at / "config.json", auto_map={"AutoModelForCausalLM": "evil.Evil"}),
        "auto_map",
        "remote code",
    ),
    (
        "code of the tokenizer",
        lambda at: edit(at / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Evil"]}),
        "auto_map",
        "tokenizer_config.json.*Remove auto_map",
    ),
    (
        "quantised",
        lambda at: edit(at / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "quantization_config",
        "bitsandbytes",
    ),
    (
        "quantised somehow",
        lambda at: edit(at / "config.json", quantization_config="int3"),
        "quantization_config",
        "unnamed",
    ),
    *(
        (name, lambda at, name=name: (at / name).write_text("{}"), "quantization_config", name)
        for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
    ),
    (
        "encoder and decoder",
        lambda at: edit(at / "config.json", is_encoder_decoder=True),
        "is_encoder_decoder",
        "Encoder-decoder",
    ),
    (
        "gguf",
        lambda at: (at / "model.safetensors").rename(at / "model.Q4_K.gguf"),
        "gguf",
        r"GGUF \(model\.Q4_K\.gguf\).*safetensors that they were made of",
    ),
    ("pickles", lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"), "pickle", "convert"),
]


@pytest.mark.parametrize(("change", "feature", "words"), [case[1:] for case in FOREIGN], ids=[c[0] for c in FOREIGN])
def test_refused_by_name_before_anything_is_read(
    folder: Path, change: Callable[[Path], object], feature: str, words: str
) -> None:
    change(folder)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"not looked at")
    error = refused(folder, words)
    assert isinstance(error, UnsupportedModelError)
    assert error.feature == feature


def test_a_folder_of_gguf_alone(tmp_path: Path) -> None:
    (tmp_path / "llama.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "GGUF")


SIZES = (0, -1, 10**12, 10**400, 1.5, "many", True)
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
NUMBERS = [(name, value) for name in NAMES for value in SIZES]
NUMBERS += [
    ("hidden_size", [64]),
    ("intermediate_size", [96, 10**12]),
    ("intermediate_size", 10**12),
    ("head_dim", 0),
    ("max_position_embeddings", 1 << 62),
]
NUMBERS += [("rms_norm_eps", 0), ("rope_theta", -1.0), ("rope_parameters", {"rope_type": "default", "rope_theta": 0})]
NUMBERS += [("architectures", 5), ("architectures", {"a": 1}), ("eos_token_id", "x"), ("eos_token_id", [[1]])]
NUMBERS += [("eos_token_id", value) for value in (-1, 10**30, True, [2, -5])]
NUMBERS += [("num_local_experts", 400_000), ("num_experts", -1), ("n_routed_experts", True), ("moe_num_experts", "8")]
NUMBERS += [("rope_parameters", {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2}})]
NUMBERS += [("text_config", {"rope_scaling": {"factor": 0}}), ("num_labels", 10**9), ("num_layers", 10**9)]
NUMBERS += [("audio_config", {"encoder_config": {"num_hidden_layers": 10**9}})]


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=lambda value: str(value)[:20])
def test_numbers_that_no_model_has(folder: Path, name: str, value: object) -> None:
    edit(folder / "config.json", **{name: value})
    refused(folder, "config.json says .* it must be")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 1 << 19, "head_dim": 16}, r"embed_tokens\.weight is \[320, 64\] instead of \[320, 524288\]"),
        ({"num_hidden_layers": 4096, "intermediate_size": 1 << 21, "hidden_size": 1 << 14}, "Not enough memory"),
        ({"vocab_size": 1 << 23, "hidden_size": 1 << 18}, "Not enough memory"),
        ({"num_hidden_layers": 4096, "num_experts": 4096}, "4096 in each of 4096 layers"),
        ({"hidden_act": {"a": 1}}, "hidden_act"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "rope_type = "),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": "../../x"}, "does not describe a model"),
        ({"model_type": ["llama"]}, "does not describe a model"),
        ({"dtype": 3}, "dtype = .3.: such weights"),
        ({"model_type": "bert"}, "model_type = .bert. and architectures"),
        ({"model_type": "qwen2"}, "architecture is Qwen2ForCausalLM"),
        ({"max_position_embeddings": 32}, "max_model_len 64 is more than the 32"),
    ],
)
def test_configurations_that_do_not_fit_together(folder: Path, values: dict[str, Any], words: str) -> None:
    """Sizes that are each possible are refused by the memory they would take, before any is taken."""
    edit(folder / "config.json", **values)
    refused(folder, words)


TEXTS = {
    "nested": '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
    "nan": '{"rms_norm_eps": NaN}',
    "infinity": '{"rope_theta": -Infinity}',
    "overflow": '{"rope_theta": 1e999}',
    "many digits": '{"hidden_size": ' + "9" * 5000 + "}",
    "not utf-8": "\udcff",
    "nothing": "",
    "a list": "[]",
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_json_that_is_none(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(folder, name)


DECISIVE = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"]
DECISIVE += ["vocab.json", "special_tokens_map.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", DECISIVE)
def test_files_of_gigabytes_are_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        os.truncate(file.fileno(), 8 << 30)  # sparse
    refused(folder, f"{name} has .*MiB")


@pytest.mark.parametrize("key", ["configuration_files", "attribute_map"])
def test_the_configuration_that_is_checked_is_the_one_that_is_read(folder: Path, key: str) -> None:
    other = {**json.loads((folder / "config.json").read_text()), "rms_norm_eps": 0.5}
    (folder / "config.4.0.0.json").write_text(json.dumps(other))
    edit(folder / "config.json", **{key: ["config.4.0.0.json"] if "files" in key else {"eps": "rms_norm_eps"}})
    refused(folder, f"{key} = .* remove it")


@pytest.mark.parametrize(
    "name", ["generation_config.json", "special_tokens_map.json", "additional_chat_templates/a.jinja"]
)
def test_links_to_what_can_be_waited_on_for_ever(folder: Path, name: str) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/kmsg")
    refused(folder, f"{name} leads to /proc/kmsg")


def test_names_that_a_terminal_would_obey_are_escaped(folder: Path) -> None:
    save_file({**load_file(folder / "model.safetensors"), "a\nb\x1b[31m": torch.zeros(1)}, folder / "model.safetensors")
    refused(folder, re.escape(r"unexpected: a\nb\x1b[31m."))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["loop", "pipe", "folder", "zeros"])
def test_files_that_are_none(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    if kind == "loop":
        path.symlink_to(name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    refused(folder, name.partition(".")[0])


@pytest.mark.parametrize("eos", [-1, 10**30, True, [1, True]])
def test_ends_that_are_no_ids(folder: Path, eos: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=eos)
    refused(folder, r"generation_config\.json says eos_token_id = .* it must be")


def test_an_index_of_another_checkpoint(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"no.such.weight": "model.safetensors"}}))
    assert isinstance(refused(folder, "lists no tensor that its files hold, but no.such.weight"), WeightsError)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    load_engine(folder, CONFIG)


def test_learned_positions_that_no_file_holds_take_no_memory(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family_checkpoint("gpt2"), tmp_path / "model"))
    edit(folder / "config.json", n_positions=3_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError, match="do not fit the configuration: its model has"):
        load_runner(folder, read_config(folder), CONFIG, torch.float32, backend("cpu"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_what_the_self_check_builds_is_small() -> None:
    assert shrunk(family_config("gpt2", n_positions=3_000_000)[1])["n_positions"] == 512
    groups = {"n_routed_experts": 4096, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 2}
    assert shrunk(family_config("deepseek_v3", **groups)[1])["n_routed_experts"] == 32  # 8 of 2 groups of 4


def test_the_command_ends_with_one_line_and_no_traceback(folder: Path) -> None:
    """As a person meets it: the last line names the file, and the exit code says that it is the model."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((5 << 30).to_bytes(8, "little"))
    program = (
        "import sys; from headrace.worker.cli import run; "
        f"sys.exit(run(['worker', '--embedded', '--check', '--model', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("headrace worker: ") and "model.safetensors is no readable safetensors file" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_files_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As root reads everything, opening fails by itself."""
    (folder / "chat_template.jinja").write_text("x")
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    refused(folder, rf"cannot be read: .*Permission denied: .*{name}")


def test_a_folder_that_goes_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(at: Path) -> list[Path]:
        return list((at / "gone").iterdir())

    monkeypatch.setattr("headrace.engine.hub.decisive_files", gone)
    refused(folder, r"cannot be read: .*No such file or directory")


@pytest.mark.parametrize(
    "template", [5, True, 1.5, [1], [{"name": "x"}], [{"name": "default", "template": 7}], {"default": 5}, ["x"]]
)
def test_chat_templates_that_are_no_texts(folder: Path, template: object) -> None:
    edit(folder / "tokenizer_config.json", chat_template=template)
    refused(folder, r"tokenizer_config\.json says chat_template = .*it must be a text")


@pytest.mark.parametrize("template", ["x", [{"name": "default", "template": "x"}], {"default": "x"}, None])
def test_chat_templates_that_are(folder: Path, template: object) -> None:
    edit(folder / "tokenizer_config.json", chat_template=template)
    load_engine(folder, CONFIG)
