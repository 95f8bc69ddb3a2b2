"""Reading and writing checkpoint folders, against the fixtures and against the safetensors library."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIG = {"model_type": "deepseek_v3", "nested": {"b": 1, "a": [1, 2]}}


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return {
        "embed": draw(64, 32).astype(ml_dtypes.bfloat16),
        "bias": draw(5),
        "odd": draw(3, 7).astype(ml_dtypes.bfloat16),
        "half": draw(2, 3).astype(np.float16),
        "empty": draw(0, 4),
        "scalar": np.array(2.5, dtype=np.float32),
        "words": rng.integers(-(2**31), 2**31, (2, 3), np.int32),
        "signed": rng.integers(-128, 128, (3, 5), np.int8),
        "bytes": rng.integers(0, 256, 7, np.uint8),
    }


def written(folder: Path, **options) -> Checkpoint:
    write_checkpoint(folder, CONFIG, some_tensors(), **options)
    return Checkpoint.open(folder)


@pytest.mark.parametrize(("folder", "num_files"), [("kimi_k2", 1), ("dsv3_groups", 4)])
def test_a_folder_gives_the_tensors_that_the_safetensors_library_gives(folder, num_files):
    files = sorted((FIXTURES / folder).glob("*.safetensors"))
    expected = {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}
    checkpoint = Checkpoint.open(FIXTURES / folder)
    assert len(files) == num_files
    assert checkpoint.names == sorted(expected)
    assert checkpoint.num_bytes == sum(array.nbytes for array in expected.values())
    for name, array in expected.items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == array.dtype
        assert tensor.shape == checkpoint.shape(name) == array.shape
        np.testing.assert_array_equal(tensor, array)


def test_codes_of_eight_bits_are_read_back(tmp_path):
    """Which the safetensors library cannot do."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(16, 16)
    write_checkpoint(tmp_path, CONFIG, {"codes": codes})
    found = Checkpoint.open(tmp_path).tensor("codes")
    assert found.dtype == codes.dtype
    np.testing.assert_array_equal(found.view(np.uint8), codes.view(np.uint8))


def test_dtypes_are_told_in_the_spelling_of_the_file():
    checkpoint = Checkpoint.open(FIXTURES / "kimi_k2")
    assert checkpoint.dtype("model.embed_tokens.weight") == "BF16"
    assert checkpoint.dtype("model.layers.1.mlp.gate.e_score_correction_bias") == "F32"


def test_a_tensor_is_a_read_only_view_of_the_file_and_not_a_copy(tmp_path):
    checkpoint = written(tmp_path)
    first, again = checkpoint.tensor("embed"), checkpoint.tensor("embed")
    assert np.shares_memory(first, again)
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1


def test_config_is_a_fresh_copy_each_time(tmp_path):
    checkpoint = written(tmp_path)
    checkpoint.config["nested"]["a"].append(3)
    assert checkpoint.config == CONFIG


def test_has_tells_known_from_unknown_names(tmp_path):
    checkpoint = written(tmp_path)
    assert checkpoint.has("embed")
    assert not checkpoint.has("embedding")


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 5000, 1 << 30])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, max_shard_bytes):
    checkpoint = written(tmp_path, max_shard_bytes=max_shard_bytes)
    assert checkpoint.config == CONFIG
    assert checkpoint.names == sorted(some_tensors())
    for name, array in some_tensors().items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == array.dtype
        assert tensor.flags.aligned
        np.testing.assert_array_equal(tensor, array)


def test_files_stay_within_the_shard_size_and_the_index_names_them_all(tmp_path):
    written(tmp_path, max_shard_bytes=200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in some_tensors().values())
    sizes = [sum(a.nbytes for a in safetensors.numpy.load_file(file).values()) for file in files]
    assert [size for size in sizes if size > 200] == [64 * 32 * 2]


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    written(tmp_path)
    loaded = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert sorted(loaded) == sorted(some_tensors())
    for name, array in some_tensors().items():
        np.testing.assert_array_equal(loaded[name], array)


def test_arrays_that_are_not_contiguous_are_written_in_their_logical_order(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_checkpoint(tmp_path, CONFIG, {"transposed": array.T, "strided": array[:, ::2]})
    checkpoint = Checkpoint.open(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensor("transposed"), array.T)
    np.testing.assert_array_equal(checkpoint.tensor("strided"), array[:, ::2])


@pytest.mark.parametrize("dtype", [np.float64, np.int64, ">f4"])
def test_a_dtype_that_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path, dtype):
    tensors = {"good": np.zeros(3, np.float32), "bad": np.zeros(3, dtype)}
    with pytest.raises(CheckpointError, match="'bad' has dtype"):
        write_checkpoint(tmp_path, CONFIG, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_weights_is_not_written_over(tmp_path):
    written(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the folder already holds weights"):
        write_checkpoint(tmp_path, CONFIG, some_tensors(), max_shard_bytes=100)


def test_a_checkpoint_without_tensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="without tensors"):
        write_checkpoint(tmp_path, CONFIG, {})


def test_the_fingerprint_does_not_depend_on_files_or_the_order_of_config(tmp_path):
    whole = written(tmp_path / "whole")
    sharded = written(tmp_path / "sharded", max_shard_bytes=100)
    (tmp_path / "whole/config.json").write_text(json.dumps(dict(reversed(CONFIG.items()))))
    assert len(whole.fingerprint) == 64
    assert Checkpoint.open(tmp_path / "whole").fingerprint == whole.fingerprint == sharded.fingerprint


@pytest.mark.parametrize("change", ["config", "name", "shape", "dtype", "first", "last", "missing"])
def test_the_fingerprint_changes_with(tmp_path, change):
    tensors, config = {"w": np.ones((64, 256), np.float32), "v": np.ones(2, np.float16)}, dict(CONFIG)
    write_checkpoint(tmp_path / "before", config, tensors)
    match change:
        case "config":
            config["rope_theta"] = 1
        case "name":
            tensors["u"] = tensors.pop("v")
        case "shape":
            tensors["w"] = tensors["w"].reshape(256, 64)
        case "dtype":
            tensors["v"] = tensors["v"].view(ml_dtypes.bfloat16)
        case "first":
            tensors["w"][0, 0] = 2
        case "last":
            tensors["w"][-1, -1] = 2
        case "missing":
            del tensors["v"]
    write_checkpoint(tmp_path / "after", config, tensors)
    before, after = Checkpoint.open(tmp_path / "before"), Checkpoint.open(tmp_path / "after")
    assert before.fingerprint != after.fingerprint


def test_the_single_file_wins_where_an_index_lies_beside_it(tmp_path):
    written(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert Checkpoint.open(tmp_path).has("embed")


def test_a_folder_may_be_named_by_a_string_and_moved(tmp_path):
    fingerprint = written(tmp_path / "here").fingerprint
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert Checkpoint.open(str(tmp_path / "there")).fingerprint == fingerprint


def test_a_folder_of_links_as_the_hub_s_cache_has_it_is_read(tmp_path):
    written(tmp_path / "blobs", max_shard_bytes=100)
    snapshot = tmp_path / "snapshots" / "f9d8c7"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = file.rename(tmp_path / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    checkpoint = Checkpoint.open(snapshot)
    for name, array in some_tensors().items():
        np.testing.assert_array_equal(checkpoint.tensor(name), array)


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": "595 GB"}, {"total_parameters": 1.5, "nested": [{}]}])
def test_an_index_may_list_tensors_in_any_order_and_say_anything_else(tmp_path, metadata):
    written(tmp_path, max_shard_bytes=100)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": dict(reversed(weight_map.items())), "metadata": metadata, "more": 1}))
    assert Checkpoint.open(tmp_path).names == sorted(some_tensors())
