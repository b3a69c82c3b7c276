"""Safetensors headers, good and bad: what is believed of a file, and in what words the rest is refused."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoint import open_checkpoint, tensor_shapes
from headrace.engine.errors import ModelError, WeightsError
from headrace.engine.safetensors_header import ITEM_BYTES, MOST_HEADER_BYTES, HeaderError, read_header
from headrace.engine.tensor_copy import Place

Header = dict[str, Any]
F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
NEXT = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def packed(header: Header | str | bytes, data: bytes = bytes(32), length: int | None = None) -> bytes:
    """A file of this header and data; `length` is what it says of the header's length."""
    text = json.dumps(header) if isinstance(header, dict) else header
    content = text if isinstance(text, bytes) else text.encode()
    return (len(content) if length is None else length).to_bytes(8, "little") + content + data


def read(content: bytes) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in read_header(io.BytesIO(content), len(content))}


def test_a_header_is_read_whole() -> None:
    content = packed({"__metadata__": {"format": "pt"}, "b": NEXT, "a": F32})
    first, second = read_header(io.BytesIO(content), len(content))
    assert (first.name, first.dtype, first.shape, first.num_bytes) == ("a", "F32", (2, 3), 24)
    assert (second.name, second.begin + second.num_bytes) == ("b", len(content))
    assert read(packed("{}   ", b"")) == {}
    scalar_and_nothing = {
        "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "n": {"dtype": "F32", "shape": [0, 1 << 60], "data_offsets": [4, 4]},
    }
    assert read(packed(scalar_and_nothing, bytes(4))) == {"s": (), "n": (0, 1 << 60)}


NESTED = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
BAD: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "only 0 bytes"),
    ("seven bytes", bytes(7), "only 7 bytes"),
    ("gigabytes of header", packed({"a": F32}, length=5 << 30), r"5368709120 bytes, and the whole file has"),
    ("more than there is", packed("{}", b"", length=3), "should have 3 bytes"),
    ("no JSON", packed("{oops}"), "no JSON"),
    ("no object", packed("[1]"), "no JSON object"),
    ("no text", packed(b"{\xff}"), "no JSON"),
    ("nested", packed(NESTED), "no JSON that can be read"),
    ("a name twice", packed('{"a":%s,"a":%s}' % ((json.dumps(F32),) * 2)), "'a' stands there twice"),
    ("not a number", packed('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}'), "NaN"),
    ("no entry", packed({"a": 3}), "type 'None'"),
    ("unknown type", packed({"a": {**F32, "dtype": "Q4"}}), "type 'Q4', which is not known"),
    ("a list as type", packed({"a": {**F32, "dtype": ["F32"]}}), "not known"),
    ("negative", packed({"a": {**F32, "shape": [-2, -3]}}), "shape that cannot be"),
    ("a fraction", packed({"a": {**F32, "shape": [2.0, 3]}}), "shape that cannot be"),
    ("enormous", packed({"a": {**F32, "shape": [10**30]}}), "shape that cannot be"),
    ("overflowing", packed({"a": {**F32, "shape": [1 << 33, 1 << 33]}}), "needs .* bytes"),
    ("many sizes", packed({"a": {**F32, "shape": [1] * 1000}}), "shape that cannot be"),
    ("three offsets", packed({"a": {**F32, "data_offsets": [0, 24, 24]}}), "offsets that cannot be"),
    ("backwards", packed({"a": {**F32, "data_offsets": [24, 0]}}), "offsets that cannot be"),
    ("too few bytes", packed({"a": {**F32, "data_offsets": [0, 20]}}), "needs 24 bytes"),
    ("outside", packed({"a": F32}, bytes(10)), "cut short"),
    ("overlapping", packed({"a": F32, "b": {**NEXT, "data_offsets": [20, 28]}}, bytes(28)), "shares bytes"),
    ("a gap", packed({"a": F32, "b": {**NEXT, "data_offsets": [26, 34]}}, bytes(34)), "gap of 2 bytes"),
    ("bytes behind", packed({"a": F32}, bytes(32)), "tensors end at byte"),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_damaged_header_is_one_error(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors is no readable safetensors file.*" + words) as caught:
        tensor_shapes(tmp_path)
    assert caught.value.names == ("model.safetensors",)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    """The file is sparse: 40 GB that nobody has written."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((MOST_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, 40 << 30)
    with pytest.raises(WeightsError, match="at most 16777216 are read"):
        tensor_shapes(tmp_path)


def valid(draw: st.DrawFn) -> tuple[Header, bytes]:
    header: Header = {}
    end = 0
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = int(torch.Size(shape).numel()) * ITEM_BYTES[dtype]
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header, bytes(end)


numbers = st.one_of(st.integers(-3, 40), st.sampled_from([1 << 31, 1 << 63, 1 << 64, 10**25, -(1 << 63)]))
values = st.one_of(numbers, st.none(), st.booleans(), st.text(max_size=3), st.lists(numbers, max_size=3), st.floats())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_changed_header_is_refused_or_describes_the_file(data: st.DataObject) -> None:
    """Never any other error; and what is accepted lies in the file, without overlap."""
    header, content = data.draw(st.composite(valid)())
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "entry", "bytes", "cut"]))
    if field == "entry":
        header[name] = data.draw(values)
    elif field not in ("bytes", "cut"):
        header[name][field] = data.draw(values)
    file = bytearray(packed(header, content))
    if field == "bytes":
        for at in data.draw(st.lists(st.integers(0, len(file) - 1), min_size=1, max_size=4)):
            file[at] = data.draw(st.integers(0, 255))
    elif field == "cut":
        del file[data.draw(st.integers(0, len(file) - 1)) :]
    try:
        tensors = read_header(io.BytesIO(file), len(file))
    except HeaderError as error:
        assert len(str(error)) < 600
        return
    at = 8 + int.from_bytes(file[:8], "little")
    for tensor in tensors:
        assert tensor.begin == at
        at += tensor.num_bytes
    assert at == len(file)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("stored", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("wanted", DTYPES.values(), ids=list(DTYPES))
def test_values_come_to_their_places(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Into whole tensors, into rows of wider ones, transposed, and larger than the buffer."""
    shapes = {"whole": (5, 7), "part": (6, 4), "turned": (3, 8), "scalar": (), "none": (0, 3), "big": (3000, 1500)}
    stacked = (3, 5, 8)
    tensors = {name: torch.randn(shape).to(stored) for name, shape in {**shapes, "stacked": stacked}.items()}
    save_file({**tensors, "spare": torch.arange(3)}, tmp_path / "model.safetensors")
    targets = {name: torch.full(shape, torch.nan, dtype=wanted) for name, shape in shapes.items()}
    around = torch.full((8, 9), torch.nan, dtype=wanted)
    targets["part"] = around[1:7, 2:6]
    targets["turned"] = torch.full((8, 3), torch.nan, dtype=wanted).T
    targets["big"] = torch.full((3000, 1501), torch.nan, dtype=wanted)[:, :1500]
    turned = torch.full((3, 2, 4, 5), torch.nan, dtype=wanted).transpose(1, 2)  # as experts lie
    places = {name: Place(target, tuple(target.shape)) for name, target in targets.items()}
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.fill({**places, "stacked": Place(turned, stacked, transposed=True)})
    expected = load_file(tmp_path / "model.safetensors")
    for name, target in targets.items():
        assert torch.equal(target, expected[name].to(wanted)), name
    assert torch.equal(turned, expected["stacked"].to(wanted).transpose(1, 2).reshape(3, 4, 2, 5))
    assert int(around.isnan().sum()) == around.numel() - 24


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 200)
        with pytest.raises(WeightsError, match="shorter than its header says"):
            checkpoint.fill({"a": Place(torch.empty(100), (100,))})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8, torch.float64, torch.int32])
def test_weights_of_types_that_only_quantised_ones_have(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(
        {"a.weight": torch.zeros(4).to(dtype), "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / "model.safetensors"
    )
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.fill({})
        with pytest.raises(WeightsError, match=r"F32, F16, BF16; a\.weight is \w+\. Quantised") as caught:
            checkpoint.fill({"a.weight": Place(torch.empty(4), (4,))})
    assert caught.value.names == ("a.weight",)


def split(folder: Path, **files: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write files and give the map of an index that names them."""
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    zero = torch.zeros(1)
    weight_map = split(tmp_path, one={"a": zero, "b": zero.clone()}, two={"b": zero, "c": zero.clone()})
    write_index(tmp_path, weight_map)
    with pytest.raises(WeightsError, match=r"b twice: in one\.safetensors and in two\.safetensors"):
        tensor_shapes(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], 3, "model.safetensors", {}, {"a": ["x"]}, {"a": "a\0b"}, {"a": ".."}])
def test_an_index_that_is_none(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(WeightsError, match=r"index\.json (has no map|names files that are not)"):
        tensor_shapes(tmp_path)


def test_an_index_of_pickles_and_names_that_none_can_have(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    write_index(tmp_path, {"a": "pytorch_model.bin"})
    with pytest.raises(WeightsError, match="no safetensors"):
        tensor_shapes(tmp_path)
    write_index(tmp_path, {"a": "x" * 5000})
    with pytest.raises(WeightsError, match="not beside it"):
        tensor_shapes(tmp_path)


def test_parts_without_an_index(tmp_path: Path) -> None:
    split(tmp_path, **{"model-00001-of-00002": {"a": torch.zeros(1)}})
    with pytest.raises(WeightsError, match=r"parts of a checkpoint .* but no model\.safetensors\.index\.json"):
        tensor_shapes(tmp_path)


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    """As in the hub's cache, where files are links to blobs."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    save_file({"a": torch.zeros(3)}, blobs / "0123")
    link = folder / "model.safetensors"
    link.symlink_to("../blobs/0123")
    assert tensor_shapes(folder) == {"a": (3,)}
    link.unlink()
    link.symlink_to("model.safetensors")
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        tensor_shapes(folder)
    write_index(folder, {"a": "model.safetensors"})
    with pytest.raises(WeightsError, match="not beside it"):
        tensor_shapes(folder)
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(WeightsError, match="not beside it"):
        tensor_shapes(folder)


def test_a_shard_is_opened_once_and_headers_need_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index(tmp_path, split(tmp_path, one={"a": torch.zeros(1 << 20)}, two={"b": torch.zeros(3)}))
    opened: list[str] = []
    real = Path.open

    def counting(self: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(self.name)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", counting)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.fill({"a": Place(torch.empty(1 << 20), (1 << 20,)), "b": Place(torch.empty(3), (3,))})
    assert sorted(opened) == ["model.safetensors.index.json", "one.safetensors", "two.safetensors"]
    with pytest.raises(ModelError), open_checkpoint(tmp_path / "nowhere"):
        pass
