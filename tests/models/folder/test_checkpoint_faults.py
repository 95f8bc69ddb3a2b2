"""Every fault of a checkpoint folder is one CheckpointError that names the file and the tensor or field."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}


def write_raw(path: Path, header: object, data_bytes: int = 24) -> None:
    """A safetensors file with any header: an object to be dumped, or the header's own bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder with one file."""
    (tmp_path / "config.json").write_text("{}")
    write_raw(tmp_path / FILE, GOOD)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good folder with two files and an index."""
    tensors = {"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}
    write_checkpoint(tmp_path, {}, tensors, max_shard_bytes=16)
    return tmp_path


def fault(folder: Path) -> str:
    """The one message with which the folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_the_good_folders_open(folder):
    assert Checkpoint.open(folder).names == ["a", "b"]


def test_a_missing_folder(tmp_path):
    assert fault(tmp_path / "nowhere") == f"{tmp_path}/nowhere: no such folder"


def test_a_file_in_place_of_the_folder(folder):
    assert "no such folder" in fault(folder / FILE)


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert fault(folder) == f"{folder}/config.json: No such file or directory"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff{}", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_a_config_that_is_no_json_object(folder, content):
    (folder / "config.json").write_bytes(content)
    assert fault(folder).startswith(f"{folder}/config.json: the file is ")


def test_no_weights(folder):
    (folder / FILE).unlink()
    assert fault(folder) == f"{folder}: no weights: neither {FILE} nor {INDEX}"


@pytest.mark.parametrize("missing_bytes", [1, 8, 23, 24])
def test_a_truncated_file_tells_how_many_bytes_are_missing(folder, missing_bytes):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-missing_bytes])
    tensor = "b" if missing_bytes <= 8 else "a"
    assert fault(folder) == f"{folder / FILE}: truncated: {missing_bytes} bytes are missing, from tensor '{tensor}' on"


def test_a_file_truncated_in_its_header_tells_how_many_bytes_are_missing(folder):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[: len(content) - 24 - 5])
    assert fault(folder) == f"{folder / FILE}: truncated in its header: 5 bytes are missing"


@pytest.mark.parametrize("start", [b"version https://", b"\x89PNG\r\n\x1a\n", (100_000_001).to_bytes(8, "little")])
def test_a_file_of_another_kind_is_not_called_truncated(folder, start):
    (folder / FILE).write_bytes(start + b"garbage")
    assert fault(folder).startswith(f"{folder / FILE}: not a safetensors file")


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_a_file_too_short_for_the_length_of_its_header(folder, num_bytes):
    (folder / FILE).write_bytes(bytes(num_bytes))
    assert fault(folder).startswith(f"{folder / FILE}: truncated: {num_bytes} bytes")


def test_a_folder_in_place_of_a_file(folder):
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    assert fault(folder) == f"{folder / FILE}: Is a directory"


@pytest.mark.parametrize("header", [b"not json", b"[]", b'{"a": {}, "a": {}}', b"\xff\xff"])
def test_a_header_that_is_no_json_object(folder, header):
    write_raw(folder / FILE, header)
    assert fault(folder).startswith(f"{folder / FILE}: the header is ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": None}, "dtype is missing"),
        ({"shape": None}, "shape is no list of sizes"),
        ({"shape": [2, -2]}, "shape is no list of sizes"),
        ({"shape": [2, True]}, "shape is no list of sizes"),
        ({"shape": [2.0, 2]}, "shape is no list of sizes"),
        ({"shape": [2, 3]}, "F32 [2, 3] takes 24 bytes, not 16"),
        ({"dtype": "F64"}, "F64 [2, 2] takes 32 bytes, not 16"),
        ({"data_offsets": None}, "data_offsets are no [start, end]"),
        ({"data_offsets": [0]}, "data_offsets are no [start, end]"),
        ({"data_offsets": [16, 0]}, "data_offsets are no [start, end]"),
        ({"data_offsets": [-16, 0]}, "data_offsets are no [start, end]"),
        ({"data_offsets": [0, 15]}, "takes 16 bytes, not 15"),
        ({"data_offsets": [8, 24]}, "leaves a gap after 'the header'"),
        ({"shape": [0], "data_offsets": [0, 0]}, "tensor 'b' leaves a gap after 'a'"),
        ({"shape": [5], "data_offsets": [0, 20]}, "tensor 'b' overlaps 'a'"),
        ({"data_offsets": [10**30, 10**30 + 16]}, "truncated"),
    ],
)
def test_a_faulty_entry_of_a_header(folder, change, message):
    write_raw(folder / FILE, {**GOOD, "a": {**GOOD["a"], **change}})
    text = fault(folder)
    assert text.startswith(f"{folder / FILE}: ")
    assert message in text
    assert "'a'" in text


def test_an_entry_that_is_no_object(folder):
    write_raw(folder / FILE, {**GOOD, "a": 3})
    assert fault(folder) == f"{folder / FILE}: tensor 'a': dtype is missing or no string"


def test_bytes_that_belong_to_no_tensor(folder):
    write_raw(folder / FILE, GOOD, data_bytes=30)
    assert fault(folder) == f"{folder / FILE}: 6 bytes at the end belong to no tensor"


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_damaged_byte_of_a_header_is_a_checkpoint_or_its_one_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
):
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text("{}")
    write_raw(folder / FILE, GOOD)
    content = bytearray((folder / FILE).read_bytes())
    for at, byte in changes:
        content[at % len(content)] = byte
    (folder / FILE).write_bytes(content)
    try:
        checkpoint = Checkpoint.open(folder)
        arrays = [checkpoint.tensor(name) for name in checkpoint.names]
    except CheckpointError as error:
        message = str(error)
        assert message.startswith(f"{folder / FILE}: "), message
        assert "\n" not in message
        return
    assert sum(array.nbytes for array in arrays) == checkpoint.num_bytes
    assert checkpoint.fingerprint


def test_an_unknown_tensor_is_named(folder):
    checkpoint = Checkpoint.open(folder)
    for ask in (checkpoint.tensor, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(CheckpointError, match=r"no tensor 'c'$"):
            ask("c")


@pytest.mark.parametrize(("dtype", "num_bytes"), [("F8_E5M2", 4), ("I64", 32), ("F64", 32), ("NEW", 5)])
def test_a_dtype_that_cannot_be_read_is_refused_when_read_and_not_before(folder, dtype, num_bytes):
    write_raw(folder / FILE, {"q": {"dtype": dtype, "shape": [4], "data_offsets": [0, num_bytes]}}, num_bytes)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.dtype("q") == dtype
    assert checkpoint.num_bytes == num_bytes
    with pytest.raises(CheckpointError, match=f"'q' has dtype {dtype}; F32, F16, BF16, F8_E4M3, I32, I8, U8 can be"):
        checkpoint.tensor("q")


def test_a_tensor_in_two_files(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert fault(sharded) == f"{second}: tensor 'a' is already in {first.name}"


def test_an_index_that_names_a_missing_file(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert (
        fault(sharded) == f"{sharded / INDEX}: tensor 'b' is in model-00002-of-00002.safetensors, which does not exist"
    )


def test_an_index_that_names_a_missing_tensor(sharded):
    edit_index(sharded, lambda names: names.update(c=names["a"]))
    assert fault(sharded) == f"{sharded / INDEX}: tensor 'c' is not in model-00001-of-00002.safetensors"


def test_an_index_that_names_the_wrong_file(sharded):
    edit_index(sharded, lambda names: names.update(c=names["b"], b=names["a"]))
    assert fault(sharded) == f"{sharded / INDEX}: tensor 'b' is not in model-00001-of-00002.safetensors"


@pytest.mark.parametrize("file", ["../weights.safetensors", "/etc/hostname", "a/b", 3, None])
def test_an_index_that_leads_out_of_the_folder(sharded, file):
    edit_index(sharded, lambda names: names.update(a=file))
    assert fault(sharded).startswith(f"{sharded / INDEX}: weight_map gives tensor 'a' no plain file name")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_without_a_weight_map(sharded, index):
    (sharded / INDEX).write_text(index)
    assert fault(sharded) == f"{sharded / INDEX}: weight_map is missing, empty or no object"
