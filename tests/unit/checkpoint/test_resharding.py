"""`reshard` writes the same state in other files."""

import errno
import math

import pytest
import torch
from offline_states import flip, make_state, measure_memory, save_sharded, save_whole
from safetensors import safe_open

from ferrodist import DeviceMesh, Shard
from ferrodist.checkpoint import PerRank, Placed, load_distributed, save_distributed
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage import LocalStorage
from ferrodist.checkpoint.tools.diff import compare
from ferrodist.checkpoint.tools.reshard import reshard
from ferrodist.checkpoint.tools.verify import verify
from ferrodist.checkpoint.writer import SafetensorsWriter
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.errors import DistCheckpointError
from ferrodist.testing import run_ranks


def manifest_of(path):
    return read_manifest(LocalStorage(path))


def sizes_along(tensor, dim):
    return [shard.shape[dim] for shard in tensor.shards]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint of three ranks, with tensors that are divided along several dims."""
    return save_sharded(tmp_path_factory.mktemp("sharded") / "c", 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [None, 0, 1, -1, 5])
def test_same_state(sharded, tmp_path, num_ranks, dim):
    """Nothing is lost or changed, and the new checkpoint is sound."""
    reshard(sharded, tmp_path / "new", num_ranks=num_ranks, dim=dim)
    assert verify(tmp_path / "new").is_sound
    assert compare(sharded, tmp_path / "new") == []
    found, before = manifest_of(tmp_path / "new"), manifest_of(sharded)
    assert found.tree == before.tree
    assert found.tensors.keys() == before.tensors.keys()
    if dim is not None:
        for tensor in found.tensors.values():
            if "Shard" in tensor.placement:
                sizes = compute_shard_sizes(tensor.shape[dim], num_ranks)
                assert sizes_along(tensor, dim) == [size for size in sizes if size]


def test_default_dims(tmp_path):
    """The first dim that divides evenly, or else the longest; scalars and empty tensors stay whole."""
    state = {
        "even": torch.ones(3, 4, 8),
        "odd": torch.ones(3, 5),
        "short": torch.ones(2),
        "scalar": torch.tensor(1.0),
        "empty": torch.ones(0, 4),
    }
    reshard(save_whole(tmp_path / "c", state), tmp_path / "new", num_ranks=4)
    found = manifest_of(tmp_path / "new").tensors
    assert {key: tensor.placement for key, tensor in found.items()} == {
        "even": "Shard(1) over 4 ranks",
        "odd": "Shard(1) over 4 ranks",
        "short": "Shard(0) over 4 ranks",
        "scalar": "whole",
        "empty": "whole",
    }
    assert sizes_along(found["odd"], 1) == [2, 1, 1, 1]
    assert sizes_along(found["short"], 0) == [1, 1]


def test_dims_of_a_function(tmp_path):
    """The caller may choose the dim of each tensor; an impossible choice is an error."""
    path = save_whole(tmp_path / "c")

    def choose(key, shape):
        return {"model.weight": -1, "model.half": 0}.get(key)

    reshard(path, tmp_path / "new", num_ranks=2, dim=choose)
    placements = {key: tensor.placement for key, tensor in manifest_of(tmp_path / "new").tensors.items()}
    assert placements.pop("model.weight") == "Shard(1) over 2 ranks"
    assert placements.pop("model.half") == "Shard(0) over 2 ranks"
    assert set(placements.values()) == {"whole"}
    with pytest.raises(ValueError, match=r"dim gives 3 for tensor 'model.weight' of shape \(12, 10\)"):
        reshard(path, tmp_path / "other", num_ranks=2, dim=lambda key, shape: 3)
    assert not (tmp_path / "other").exists()


def test_whole_tensors_are_a_hugging_face_folder(sharded, tmp_path):
    """One rank's files are tensors by name, with an index, for readers of safetensors."""
    reshard(sharded, tmp_path / "new", num_ranks=1)
    assert (tmp_path / "new" / "model.safetensors.index.json").exists()
    (path,) = (tmp_path / "new").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        for name, tensor in make_state()["model"].items():
            if not tensor.is_complex():
                torch.testing.assert_close(file.get_tensor(f"model.{name}"), tensor, rtol=0, atol=0)


def test_many_small_files(sharded, tmp_path):
    """Files are split at their limit, in the order that streaming needs, and for more ranks than are open at once."""
    reshard(sharded, tmp_path / "new", num_ranks=3, max_file_bytes=64)
    assert len(manifest_of(tmp_path / "new").files) > 12
    assert compare(sharded, tmp_path / "new") == []
    reshard(sharded, tmp_path / "many", num_ranks=200, dim=0)
    assert verify(tmp_path / "many").is_sound
    assert compare(sharded, tmp_path / "many") == []


def _load(group, path):
    mesh = DeviceMesh(group, (group.world_size,))
    loaded = load_distributed(path, {"model": {"weight": Placed(mesh, Shard(1))}}, group=group, strict=False)
    own = load_distributed(path, {"own": PerRank(None, resize=lambda values, rank, size: values)}, group=group)
    return loaded["model"]["weight"].to_local(), own["own"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_loading(sharded, tmp_path, num_ranks):
    """Ranks load it as any other; what ranks had their own of is still that of the ranks that saved it."""
    reshard(sharded, tmp_path / "new", num_ranks=2)
    results = run_ranks(_load, num_ranks, str(tmp_path / "new"))
    weight = torch.cat([part for part, _ in results], dim=1)
    assert weight.equal(make_state()["model"]["weight"])
    for rank, (_, own) in enumerate(results):
        if num_ranks == 3:
            assert own["rank"] == rank
        else:
            assert [value["rank"] for value in own] == [0, 1, 2]
            assert [len(value["noise"]) for value in own] == [1, 2, 3]


def test_blocks_have_their_hashes(tmp_path):
    """Shards longer than a block, with edges unrelated to those of the source."""
    tensor = torch.arange(5 * 700_001, dtype=torch.int64).reshape(5, 700_001)
    path = save_whole(tmp_path / "c", {"a": tensor})
    told = []
    reshard(path, tmp_path / "new", num_ranks=3, dim=1, progress=lambda *done: told.append(done))
    assert told[-1] == (tensor.numel() * 8, tensor.numel() * 8)
    assert verify(tmp_path / "new").is_sound
    assert load_distributed(tmp_path / "new")["a"].equal(tensor)
    reshard(tmp_path / "new", tmp_path / "back", num_ranks=2, dim=0)
    assert verify(tmp_path / "back").is_sound
    assert compare(path, tmp_path / "back") == []


@pytest.mark.parametrize("dim", [0, 1])
def test_memory(tmp_path, dim):
    """A checkpoint of 256 MiB goes through 16 MiB, and as much for writing, along the dim of its shards and across."""
    state = {"large": torch.arange(32 << 20, dtype=torch.int64).view(64, -1)}
    path = save_whole(tmp_path / "whole", state)
    del state
    taken = measure_memory(lambda: reshard(path, tmp_path / "new", num_ranks=4, dim=dim, max_memory_bytes=16 << 20))
    assert taken < 40 << 20, f"{taken >> 20} MiB"
    taken = measure_memory(
        lambda: reshard(tmp_path / "new", tmp_path / "back", num_ranks=3, dim=1 - dim, max_memory_bytes=16 << 20)
    )
    assert taken < 40 << 20, f"{taken >> 20} MiB"
    assert compare(path, tmp_path / "back") == []


def test_in_place(tmp_path):
    """The new checkpoint may take the place of the old one, whose files go."""
    path = save_sharded(tmp_path / "c", 2)
    before = {file.name for file in path.glob("*.safetensors")}
    reshard(path, path, num_ranks=3)
    assert verify(path).is_sound
    assert not before & {file.name for file in path.glob("*.safetensors")}
    reshard(path, path, num_ranks=1)
    assert load_distributed(path, {"step": None}, strict=False) == {"step": 7}
    assert len(list(path.glob("*.safetensors"))) == 1


def names_in(path):
    return {name.name: name.read_bytes() for name in path.iterdir()}


def test_damage(tmp_path):
    """Damaged data isn't rewritten; the target folder stays unchanged."""
    path = save_whole(tmp_path / "c")
    (file,) = path.glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    new = save_whole(tmp_path / "new", {"older": torch.ones(3)})
    before = names_in(new)
    with pytest.raises(DistCheckpointError, match=rf"{file.name}.*is damaged"):
        reshard(path, new, num_ranks=2)
    assert names_in(new) == before
    reshard(path, new, num_ranks=2, verify=False)
    assert verify(new).is_sound


def test_full_disk(sharded, tmp_path, monkeypatch):
    """A storage that refuses half-way leaves what was there, and is told in one sentence."""
    new = save_whole(tmp_path / "new", {"older": torch.ones(3)})
    before = names_in(new)
    add, calls = SafetensorsWriter.add, []

    def fail(self, span, data):
        calls.append(span)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, span, data)

    monkeypatch.setattr(SafetensorsWriter, "add", fail)
    with pytest.raises(DistCheckpointError, match=r"could not write a checkpoint at .*new: .*No space left"):
        reshard(sharded, new, num_ranks=4)
    assert names_in(new) == before
    with pytest.raises(DistCheckpointError, match="No space left"):
        reshard(sharded, tmp_path / "absent", num_ranks=4)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_ranks": 0}, ValueError, "num_ranks must be at least 1, not 0"),
        ({"num_ranks": "2"}, TypeError, "num_ranks must be an integer, not"),
        ({"num_ranks": 2, "dim": 1.5}, TypeError, "dim must be an int, a function"),
        ({"num_ranks": 2, "max_memory_bytes": 1}, ValueError, "max_memory_bytes must be at least 16777216, not 1"),
        ({"num_ranks": 2, "max_file_bytes": 0}, ValueError, "max_file_bytes must be at least 1"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, error, message):
    """Wrong arguments are refused before anything is read."""
    with pytest.raises(error, match=message):
        reshard(tmp_path / "nowhere", tmp_path / "new", **arguments)


@pytest.mark.parametrize("dim", ["0", 1.0])
def test_a_function_of_no_dims(tmp_path, dim):
    """A function that returns anything but a dim is told so, with the tensor."""
    save_distributed({"w": torch.zeros(4, 4)}, tmp_path / "a")
    with pytest.raises(TypeError, match="dim of tensor 'w' must be an integer, not"):
        reshard(tmp_path / "a", tmp_path / "b", num_ranks=2, dim=lambda *_: dim)


def test_a_wrong_default_timeout_is_found_first(tmp_path, monkeypatch):
    """A wrong FERRODIST_TIMEOUT ends a rewrite before it has written anything."""
    save_distributed({"w": torch.zeros(4)}, tmp_path / "a")
    monkeypatch.setenv("FERRODIST_TIMEOUT", "soon")
    reports = []
    with pytest.raises(ValueError, match="FERRODIST_TIMEOUT"):
        reshard(tmp_path / "a", tmp_path / "b", num_ranks=2, progress=lambda *done: reports.append(done))
    assert not reports


def test_no_checkpoint(tmp_path):
    """There is nothing to reshard, and nothing is made."""
    with pytest.raises(DistCheckpointError, match="not there"):
        reshard(tmp_path / "nowhere", tmp_path / "new", num_ranks=2)
    assert not (tmp_path / "new").exists()


def test_tied_and_array_and_numbers(tmp_path):
    """One tensor in two places stays one, and an array an array."""
    tied = torch.arange(6.0)
    path = save_whole(tmp_path / "c", {"a": tied, "b": tied, "array": tied.numpy() + 1, "nan": math.nan})
    reshard(path, tmp_path / "new", num_ranks=2)
    loaded = load_distributed(tmp_path / "new")
    assert loaded["a"] is loaded["b"]
    assert loaded["array"].tolist() == [1, 2, 3, 4, 5, 6]
    assert math.isnan(loaded["nan"])
