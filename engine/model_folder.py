"""What a model's folder is refused for before anything large is read or made, and before transformers sees a file.

A folder may come from anybody. Nothing in it runs, and nothing in it may make the loader take more memory or time than
a model needs: files that are parsed are bounded in size, and numbers of the configuration in what they can be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from .checkpoint import INDEX, refuse_foreign_weights, some
from .errors import ModelError, ModelNotFoundError, UnsupportedModelError, WeightsError
from .json_file import MOST_INDEX_BYTES, is_file, read_json

# What the names of the files begin with that decide about a model's output, besides its weights.
DECISIVE_FILES = (
    "config.json", "generation_config.json", "tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece",
    "chat_template",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder beside them; transformers takes every *.jinja in it
MOST_TEXT_BYTES = 16 << 20
MOST_VOCABULARY_BYTES = 128 << 20
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab", "merges", "spiece")
_QUANTISED_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# The largest that a configuration may say; real models stay below a tenth of each.
_MOST = {
    "vocab_size": 1 << 23,
    "hidden_size": 1 << 19, "n_embd": 1 << 19, "d_model": 1 << 19,
    "intermediate_size": 1 << 21, "n_inner": 1 << 21, "ffn_dim": 1 << 21, "moe_intermediate_size": 1 << 21,
    "num_hidden_layers": 1 << 12, "n_layer": 1 << 12, "n_layers": 1 << 12,
    "num_layers": 1 << 12, "num_blocks": 1 << 12, "decoder_layers": 1 << 12, "encoder_layers": 1 << 12,
    "num_decoder_layers": 1 << 12, "num_encoder_layers": 1 << 12, "depth": 1 << 12,
    "num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14, "n_head": 1 << 14, "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30, "n_positions": 1 << 30, "sliding_window": 1 << 40,
    "num_local_experts": 1 << 12, "num_experts": 1 << 12, "n_routed_experts": 1 << 12, "moe_num_experts": 1 << 12,
    "num_labels": 1 << 16,  # transformers makes a name for each
    "num_experts_per_tok": 1 << 12, "n_shared_experts": 1 << 12, "num_shared_experts": 1 << 12,
}  # fmt: skip
_PER_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads")  # may be lists, one for each layer
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MAY_BE_ZERO = (
    *_EXPERTS,
    "num_experts_per_tok",
    "n_shared_experts",
    "num_shared_experts",
    "sliding_window",
    "num_labels",
)
_MOST_EXPERTS = 1 << 16  # of all layers: each has tensors, whose names and shapes are made to compare them
_VALUE_SHOWN = 60  # characters


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of(is_right: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, list) and all(map(is_right, cast("list[object]", value)))


def _is_name(value: object) -> bool:
    return isinstance(value, str)


# What values under some names must be: a test that never fails, and the same in words.
_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (
            "rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "factor", "low_freq_factor",
            "high_freq_factor",
        ),
        lambda value: _is_number(value) and value > 0, "a number above 0",
    ),
    (
        ("partial_rotary_factor", "rotary_pct"),
        lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1",
    ),
    (("short_factor", "long_factor"), lambda value: _is_list_of(_is_number, value), "a list of numbers"),
    (("architectures",), lambda value: _is_list_of(_is_name, value), "a list of names"),
    (("rope_type",), _is_name, "a name"),
)  # fmt: skip


def check_folder(model_dir: Path) -> None:
    """Refuse a folder for what can be seen from the outside and from its small files.

    Raises:
        ModelNotFoundError: there is no such directory, or no `config.json` in it.
        UnsupportedModelError: its weights are pickles or GGUF, are quantised, or it brings its own code.
        ModelError: a file is too large, is no JSON object, or holds numbers that no model has.
    """
    if not model_dir.is_dir():
        raise ModelNotFoundError(f"There is no model directory {model_dir}.")
    try:
        refuse_foreign_weights(model_dir)
        for path in (*model_dir.iterdir(), *(model_dir / TEMPLATES).glob("*")):
            _refuse_link(path)
        for path in decisive_files(model_dir):
            _check_size(path)
        _check_templates(model_dir / TEMPLATES)
        if is_file(model_dir / INDEX) and (model_dir / INDEX).stat().st_size > MOST_INDEX_BYTES:
            raise ModelError(f"{model_dir / INDEX} has more than {MOST_INDEX_BYTES >> 20} MiB.")
    except OSError as error:
        raise ModelError(f"{model_dir} cannot be read: {error}.") from error
    if not is_file(model_dir / "config.json"):
        raise ModelNotFoundError(f"{model_dir} holds no config.json, so it is no model directory.")
    _check_tokenizer_config(model_dir / "tokenizer_config.json")
    for name in _QUANTISED_BESIDE:
        if is_file(model_dir / name):
            raise UnsupportedModelError(
                "quantization_config",
                f"{model_dir} holds {name}: quantised weights are not supported; take the model as it was before.",
            )
    check_numbers(read_json(model_dir / "config.json"), model_dir / "config.json")
    if is_file(model_dir / "generation_config.json"):
        _check_eos(read_json(model_dir / "generation_config.json"), model_dir / "generation_config.json")


def decisive_files(model_dir: Path) -> Iterator[Path]:
    """The files besides the weights that decide about a model's output, in name order. Raises OSError."""
    for path in sorted(model_dir.iterdir()):
        if path.name.startswith(DECISIVE_FILES) and is_file(path):
            yield path
        elif path.name == TEMPLATES and path.is_dir():
            yield from sorted(path.glob("*.jinja"))


def check_index(model_dir: Path, names: Iterable[str]) -> None:
    """Refuse an index that speaks of another checkpoint than the one whose tensors have these names.

    Raises WeightsError.
    """
    if not is_file(model_dir / INDEX):
        return
    listed = cast("dict[str, object]", read_json(model_dir / INDEX, MOST_INDEX_BYTES).get("weight_map") or {})
    if listed.keys().isdisjoint(names):
        said = some(name[:_VALUE_SHOWN] for name in listed)
        raise WeightsError(
            f"{model_dir / INDEX} lists no tensor that its files hold, but {said}; take the index that belongs to them."
        )


def check_numbers(values: Mapping[str, Any], path: Path) -> None:
    """Refuse sizes that are no positive integers or larger than any model's. Raises ModelError, naming the value."""
    for name in ("configuration_files", "attribute_map"):  # by which transformers reads another file, or another key
        if name in values:
            raise ModelError(f"{path} says {name} = {_short(values[name])}; no model needs that key, remove it.")
    for part in _objects(values):
        _check_flat(part, path)


def _check_flat(values: Mapping[str, Any], path: Path) -> None:
    for name, most in _MOST.items():
        value: object = values.get(name)
        least = 0 if name in _MAY_BE_ZERO else 1
        if value is not None and not all(type(size) is int and least <= size <= most for size in _sizes(name, value)):
            raise ModelError(f"{path} says {name} = {_short(value)}; it must be an integer from {least} to {most}.")
    _check_experts(values, path)
    for names, is_right, what in _KINDS:
        for name in names:
            value = values.get(name)
            if value is not None and not is_right(value):
                raise ModelError(f"{path} says {name} = {_short(value)}; it must be {what}.")
    for name in ("low_freq_factor", "high_freq_factor"):
        if values.get("rope_type", values.get("type")) == "llama3" and values.get(name, 1) is None:
            raise ModelError(f"{path} says {name} = None; it must be a number above 0.")
    _check_eos(values, path)


def _objects(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration and all objects in it: transformers makes models of some, beside the text's."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from _objects(cast("dict[str, Any]", value))


def _check_experts(values: Mapping[str, Any], path: Path) -> None:
    """Refuse more experts in all than any model has. What is multiplied has been checked one by one."""
    layers: int = values.get("num_hidden_layers") or 1
    for name in _EXPERTS:
        experts: int = values.get(name) or 0
        if experts * layers > _MOST_EXPERTS:
            raise ModelError(
                f"{path} says {name} = {experts} in each of {layers} layers; it must be at most {_MOST_EXPERTS} in all."
            )


def _sizes(name: str, value: object) -> list[object]:
    return _items(value) if name in _PER_LAYER else [value]


def _items(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _check_eos(values: Mapping[str, Any], path: Path) -> None:
    eos: object = values.get("eos_token_id")
    ids = _items(eos)
    most = _MOST["vocab_size"]
    if eos is not None and not all(type(one) is int and 0 <= one < most for one in ids):
        raise ModelError(
            f"{path} says eos_token_id = {_short(eos)}; it must be an id or a list of ids, from 0 to {most - 1}."
        )


def _refuse_link(path: Path) -> None:
    """Refuse links to what only looks like a file: reading one may wait for ever."""
    target = os.path.realpath(path)  # never raises, for a loop of links neither
    if target.startswith(("/dev/", "/proc/", "/sys/")):
        raise ModelError(f"{path} leads to {target}, which is no file of a model; remove it.")


def _check_size(path: Path) -> None:
    most = MOST_VOCABULARY_BYTES if path.name.startswith(_VOCABULARIES) else MOST_TEXT_BYTES
    size = path.stat().st_size
    if size > most:
        raise ModelError(f"{path} has {size} bytes; at most {most >> 20} MiB are read of such a file.")


def _check_templates(folder: Path) -> None:
    """Refuse what transformers would open there without a look: no regular files, and too much in all."""
    paths = list(folder.glob("*.jinja"))
    for path in paths:
        if not is_file(path):
            raise ModelError(f"{path} is no file; remove it.")
    if (size := sum(path.stat().st_size for path in paths)) > MOST_TEXT_BYTES:
        raise ModelError(f"{folder} has {size} bytes of templates; at most {MOST_TEXT_BYTES >> 20} MiB are read of it.")


def _check_tokenizer_config(path: Path) -> None:
    """Refuse code of its own, and chat templates in a form that transformers would stumble over."""
    if not is_file(path):
        return
    values = read_json(path, MOST_TEXT_BYTES)
    if values.get("auto_map"):
        raise UnsupportedModelError(
            "auto_map",
            f"The tokenizer brings its own code (auto_map in {path}); remote code is never run. Remove auto_map if "
            "tokenizer.json is all that it needs.",
        )
    template: object = values.get("chat_template")
    if template is not None and not (
        _is_name(template) or _is_list_of(_is_named_template, template) or _is_map_of_texts(template)
    ):
        raise ModelError(
            f"{path} says chat_template = {_short(template)}; it must be a text, or a list of objects whose name and "
            "template are texts."
        )


def _is_map_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_name, cast("dict[str, object]", value).values()))


def _is_named_template(value: object) -> bool:
    return _is_map_of_texts(value) and {"name", "template"} <= cast("dict[str, object]", value).keys()


def _short(value: object) -> str:
    """A value of whatever size, for a message."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number of many digits"
    text = repr(value)
    return text if len(text) <= _VALUE_SHOWN else text[:_VALUE_SHOWN] + "…"
