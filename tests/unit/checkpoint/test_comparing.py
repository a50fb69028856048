"""`compare` tells every difference between two checkpoints, and none between two of the same state."""

import math

import numpy as np
import pytest
import torch
from offline_states import flip, make_state, measure_memory, save_sharded, save_whole

from ferrodist.checkpoint.format.safetensors import _DTYPES
from ferrodist.checkpoint.reader import CheckpointReader, read_manifest
from ferrodist.checkpoint.storage import LocalStorage
from ferrodist.checkpoint.tools.diff import DifferenceKind, compare
from ferrodist.checkpoint.tools.rewrite import row_blocks
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box


def differences(tmp_path, one, two):
    """The differences of two states."""
    return compare(save_whole(tmp_path / "one", one), save_whole(tmp_path / "two", two))


def test_same_state_other_placements(tmp_path):
    """Ranks and placements make no difference; `PerRank` values of other ranks do."""
    one = save_sharded(tmp_path / "one", 3)
    assert compare(one, one) == []
    two = save_sharded(tmp_path / "two", 2, weight=1, half=0)
    (only,) = compare(one, two)
    assert (only.place, only.kind) == ("['own']['2']", DifferenceKind.ONLY_IN_FIRST)


def test_trees(tmp_path):
    """Keys, values, kinds of values, lengths and shapes, each in its place."""
    one = make_state() | {"gone": torch.ones(2), "kind": [1], "ones": (1, 1.0, True), "nan": math.nan}
    two = make_state() | {"new": 1, "kind": (1,), "ones": (True, 1, 1.0), "nan": math.nan, "step": 8}
    one["numbered"]["list"], two["numbered"]["list"] = [1, 2, 3], [1, 2]
    two["model"]["weight"] = two["model"]["weight"].T.contiguous()
    two["model"]["bias"] = two["model"]["bias"].numpy()
    found = differences(tmp_path, one, two)
    assert [(str(each), each.kind.name) for each in found] == [
        ("['model']['weight']: shape (12, 10) and (10, 12)", "SHAPE"),
        ("['model']['bias']: a tensor and an array", "VALUE"),
        ("['step']: 7 and 8", "VALUE"),
        ("['numbered']['list'][2]: only in the first: 3", "ONLY_IN_FIRST"),
        ("['gone']: only in the first: a tensor", "ONLY_IN_FIRST"),
        ("['kind']: a list of 1 and a tuple of 1", "VALUE"),
        ("['ones'][0]: 1 and True", "VALUE"),
        ("['ones'][1]: 1.0 and 1", "VALUE"),
        ("['ones'][2]: True and 1.0", "VALUE"),
        ("['new']: only in the second: 1", "ONLY_IN_SECOND"),
    ]


def test_elements(tmp_path):
    """The number of differing elements and the largest difference; NaN equals NaN, and zeros have no sign."""
    one = {"a": torch.tensor([1.0, 2.0, math.nan, 0.0]), "b": torch.tensor([1.0, math.inf]), "c": torch.tensor(3)}
    two = {"a": torch.tensor([1.0, 2.5, math.nan, -0.0]), "b": torch.tensor([1.0, math.nan]), "c": torch.tensor(5)}
    found = differences(tmp_path, one, two)
    assert [(each.place, each.num_elements, each.largest) for each in found] == [
        ("['a']", 1, 0.5),
        ("['b']", 1, math.inf),
        ("['c']", 1, 2.0),
    ]
    assert str(found[0]) == "['a']: 1 of 4 elements differ, by up to 0.5"


def test_elements_of_other_dtypes(tmp_path):
    """Another dtype is one difference, other values in it are another."""
    found = differences(
        tmp_path,
        {"same": torch.arange(4), "other": torch.tensor([0.5, 0.1])},
        {"same": torch.arange(4, dtype=torch.int8), "other": torch.tensor([0.5, 0.1]).half()},
    )
    assert [(each.place, each.kind.name, each.num_elements) for each in found] == [
        ("['same']", "DTYPE", None),
        ("['other']", "DTYPE", None),
        ("['other']", "ELEMENTS", 1),
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_large_integers(tmp_path, dtype):
    """Differences of the last digit are seen, and those that leave 64 bits."""
    end = np.iinfo(str(dtype).removeprefix("torch."))
    one = {"near": torch.tensor([end.max], dtype=dtype), "far": torch.tensor([end.min], dtype=dtype)}
    two = {"near": torch.tensor([end.max - 1], dtype=dtype), "far": torch.tensor([end.max], dtype=dtype)}
    assert [each.largest for each in differences(tmp_path, one, two)] == [1.0, 2.0**64]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", list(_DTYPES))
def test_every_dtype(tmp_path, name):
    """Each dtype that checkpoints carry is compared."""
    dtype = _DTYPES[name]
    whole = torch.tensor([1, 2, 1, 0.25 if dtype.is_floating_point else 0]).to(dtype)
    other = torch.tensor([1, 0.5 if dtype.is_floating_point else 0, 1, 0.25 if dtype.is_floating_point else 0])
    assert differences(tmp_path, {"a": whole}, {"a": whole.clone()}) == []
    (found,) = compare(tmp_path / "one", save_whole(tmp_path / "three", {"a": other.to(dtype)}))
    assert found.num_elements == 1
    assert found.largest == {"bool": 1.0}.get(name, 1.5 if dtype.is_floating_point else 2.0)


def test_tied_tensors(tmp_path):
    """A tensor that has two places is compared once, and told in both."""
    one, two = torch.ones(3), torch.zeros(3)
    found = differences(tmp_path, {"a": one, "b": one}, {"a": two, "b": two})
    assert [each.place for each in found] == ["['a']", "['b']"]
    found = differences(tmp_path, {"a": one, "b": one}, {"a": one, "b": one.clone()})
    assert found == []


def test_progress_and_memory(tmp_path):
    """Bytes are told as they go, and bands are all that lies in memory."""
    state = {"large": torch.arange(64 << 20, dtype=torch.float32)}
    save_whole(tmp_path / "one", state)
    state["large"][-1] = 0
    save_whole(tmp_path / "two", state)
    del state
    told = []
    found = []

    def run():
        found.extend(compare(tmp_path / "one", tmp_path / "two", progress=lambda *done: told.append(done)))

    taken = measure_memory(run)
    assert [each.num_elements for each in found] == [1]
    assert told[-1] == (256 << 20, 256 << 20)
    assert len(told) > 10
    assert taken < 64 << 20, f"{taken >> 20} MiB"


def test_damage(tmp_path):
    """Damaged data is not compared."""
    one, two = save_whole(tmp_path / "one"), save_whole(tmp_path / "two")
    (file,) = two.glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    with pytest.raises(DistCheckpointError, match="is damaged"):
        compare(one, two)
    with pytest.raises(DistCheckpointError, match="not there"):
        compare(one, tmp_path / "nowhere")


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 4), (3, 4, 5), (2, 1, 9)])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20, 100])
def test_row_blocks(shape, limit):
    """The row blocks are the tensor, in order, each within the limit."""
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    bands = list(row_blocks(shape, limit))
    assert all(band.numel <= limit for band in bands)
    assert torch.cat([band.take(tensor).reshape(-1) for band in bands]).equal(tensor.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("verify", [True, False])
def test_long_rows(tmp_path, dtype, verify, monkeypatch):
    """Only the wanted part of rows longer than a block is read, correctly, also with a conversion."""
    tensor = torch.arange(2 * 2 * (3 << 20), dtype=torch.int32).reshape(2, 2, 3 << 20)
    storage = LocalStorage(save_whole(tmp_path / "c", {"a": tensor}))
    reader = CheckpointReader(storage, read_manifest(storage), verify=verify)
    sizes = []
    read = storage.read
    monkeypatch.setattr(storage, "read", lambda name, start, into: [sizes.append(len(into)), read(name, start, into)])
    box = Box((1, 0, 5), (1, 2, 1 << 19))
    target = torch.empty(box.shape, dtype=dtype)
    reader.read_box("a", box, target)
    storage.close()
    assert target.equal(box.take(tensor).to(dtype))
    assert sum(sizes) < 17 << 20
