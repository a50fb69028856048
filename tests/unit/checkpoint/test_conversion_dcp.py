"""Folders of torch.distributed.checkpoint become checkpoints, and checkpoints such folders."""

import io
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from offline_states import make_state, measure_memory, save_sharded, save_whole
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ferrodist.checkpoint import load_distributed
from ferrodist.checkpoint.convert import export_dcp, import_dcp
from ferrodist.checkpoint.tools.diff import compare
from ferrodist.checkpoint.tools.rewrite import RewriteOptions
from ferrodist.checkpoint.tools.verify import verify
from ferrodist.errors import DistCheckpointError
from ferrodist.testing import run_ranks


@pytest.fixture(autouse=True)
def quiet():
    """Torch warns where it has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_import(tmp_path):
    """All of a state: tensors of all dtypes, also such as don't lie row-major, lists with tensors in them, values."""
    state = {
        "model": make_state()["model"] | {"turned": torch.arange(12.0).view(3, 4).T},
        "list": [1, torch.ones(2), {"deep": torch.zeros(3)}],
        "step": 7,
        "dotted.key": torch.ones(1),
    }
    path = save(state | {"plain": [1, 2, ("x", b"y")]}, tmp_path / "dcp")
    import_dcp(path, tmp_path / "c")
    assert verify(tmp_path / "c").is_sound
    loaded = load_distributed(tmp_path / "c")
    assert loaded.pop("plain") == [1, 2, ("x", b"y")]
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)


def test_there_and_back(tmp_path):
    """Values that DCP supports come back unchanged."""
    state = make_state()
    del state["numbered"]
    path = save_whole(tmp_path / "c", state)
    export_dcp(path, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "back", options=RewriteOptions(num_ranks=3))
    assert compare(path, tmp_path / "back") == []


def test_torch_reads_it(tmp_path):
    """Sharded tensors are loaded by torch."""
    path = save_sharded(tmp_path / "c", 3)
    told = []
    export_dcp(path, tmp_path / "dcp", progress=lambda *done: told.append(done))
    assert told[-1][0] == told[-1][1] > 0
    into = {"model": {key: torch.zeros_like(each) for key, each in make_state()["model"].items()}, "step": 0}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.testing.assert_close(into["model"], make_state()["model"], rtol=0, atol=0)
    assert into["step"] == 7
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "dcp"]


def _save_with_torch(group, path):
    dist.init_process_group("gloo", init_method=f"file://{path}.meeting", rank=group.rank, world_size=group.world_size)
    try:
        mesh = init_device_mesh("cpu", (group.world_size,))
        whole = torch.arange(7.0 * 6).view(7, 6)
        state = {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "copies": distribute_tensor(whole, mesh, [Replicate()]),
        }
        dcp.save(state, checkpoint_id=path)
    finally:
        dist.destroy_process_group()
    return True


@pytest.mark.filterwarnings("ignore")
def test_of_several_ranks(tmp_path):
    """Chunks that torch's ranks have written are joined, and divided anew."""
    run_ranks(_save_with_torch, 2, str(tmp_path / "dcp"), backend="native")
    import_dcp(tmp_path / "dcp", tmp_path / "c", options=RewriteOptions(num_ranks=3))
    assert verify(tmp_path / "c").is_sound
    whole = torch.arange(7.0 * 6).view(7, 6)
    torch.testing.assert_close(
        load_distributed(tmp_path / "c"), dict.fromkeys(("rows", "columns", "copies"), whole), rtol=0, atol=0
    )


def change_metadata(path, change):
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_code_does_not_run(tmp_path):
    """Neither that of ``.metadata`` nor that of a value is called."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = save({"a": torch.ones(3), "value": Evil()}, tmp_path / "value")
    with pytest.raises(DistCheckpointError, match="'value' can't be made a checkpoint"):
        import_dcp(path, tmp_path / "c")
    path = save({"a": torch.ones(3)}, tmp_path / "evil")
    change_metadata(path, lambda metadata: setattr(metadata, "planner_data", Evil()))
    with pytest.raises(DistCheckpointError, match=r"names (posix|os)\.mkdir, which doesn't belong there"):
        import_dcp(path, tmp_path / "c")
    for name in ("eval", "getattr"):
        (path / ".metadata").write_bytes(f"cbuiltins\n{name}\n(Vprint\ntR.".encode())
        with pytest.raises(DistCheckpointError, match=f"builtins.{name}"):
            import_dcp(path, tmp_path / "c")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "c").exists()


def _outside(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path


def _shorter(metadata):
    metadata.state_dict_metadata["a"].size = torch.Size([2])


def _longer(metadata):
    metadata.state_dict_metadata["a"].size = torch.Size([4])


def _doubled(metadata):
    tensor = metadata.state_dict_metadata["a"]
    tensor.size, tensor.chunks = torch.Size([6]), tensor.chunks * 2


def _placeless(metadata):
    del metadata.storage_data[MetadataIndex("a", [0])]


def _compressed(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, r"'a' can't be made a checkpoint: it is in a file named '\.\./"),
        (_shorter, "a part of tensor 'a' is outside of its shape"),
        (_longer, "the parts of tensor 'a' have 3 elements together"),
        (_doubled, "the parts of tensor 'a' overlap, or are not all of it"),
        (_placeless, "'a' can't be made a checkpoint: it is in no file"),
        (_compressed, r"it is written with \['zstd'\]"),
    ],
)
def test_wrong_metadata(tmp_path, change, message):
    """A sentence for each."""
    path = save({"a": torch.ones(3)}, tmp_path / "dcp")
    change_metadata(path, change)
    with pytest.raises(DistCheckpointError, match=message):
        import_dcp(path, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_wrong_folders(tmp_path):
    """A missing folder, a cut file, a missing file, a damaged file."""
    with pytest.raises(DistCheckpointError, match=r"no folder of torch\.distributed\.checkpoint"):
        import_dcp(tmp_path / "nowhere", tmp_path / "c")
    path = save({"a": torch.ones(300)}, tmp_path / "dcp")
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(DistCheckpointError, match=r"__0_0\.distcp is cut off: it ends before 'a'"):
        import_dcp(path, tmp_path / "c")
    file.write_bytes(bytes(len(data)))
    with pytest.raises(DistCheckpointError, match="'a' can't be made a checkpoint"):
        import_dcp(path, tmp_path / "c")
    file.unlink()
    with pytest.raises(DistCheckpointError, match=r"__0_0\.distcp is missing, which has 'a'"):
        import_dcp(path, tmp_path / "c")
    (path / ".metadata").write_bytes(b"nothing")
    with pytest.raises(DistCheckpointError, match=r"is not what torch\.distributed.checkpoint writes"):
        import_dcp(path, tmp_path / "c")


def test_a_chunk_that_cannot_be_loaded(tmp_path, monkeypatch):
    """Chunks that aren't row-major are loaded late; a failure then is reported, and nothing stays."""
    path = save({"turned": torch.arange(12.0).view(3, 4).T}, tmp_path / "dcp")
    load = torch.load

    def fail(view, *, map_location, weights_only):
        if map_location == "cpu":
            raise RuntimeError("no memory\nand more")
        return load(view, map_location=map_location, weights_only=weights_only)

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(DistCheckpointError, match=r"'turned' can't be made a checkpoint: no memory$"):
        import_dcp(path, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_exports_that_fail(tmp_path, monkeypatch):
    """A folder that is there is left alone; one that was begun is removed."""
    path = save_whole(tmp_path / "c")
    with pytest.raises(DistCheckpointError, match="is there already"):
        export_dcp(path, path)
    with pytest.raises(DistCheckpointError, match="has a list, and torch"):
        export_dcp(save_whole(tmp_path / "list", [torch.ones(1)]), tmp_path / "dcp")
    write = dcp.filesystem._write_item
    calls = []

    def fail(*arguments, **named):
        calls.append(1)
        if len(calls) > 3:
            raise OSError("No space left on device")
        return write(*arguments, **named)

    monkeypatch.setattr(dcp.filesystem, "_write_item", fail)
    with pytest.raises(DistCheckpointError, match=r"could not write .*dcp: No space left"):
        export_dcp(path, tmp_path / "dcp")
    assert sorted(file.name for file in Path(tmp_path).iterdir()) == ["c", "list"]


def tells_offsets():
    """Return whether this torch reports the offsets of elements in a file: 2.10 does not."""
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    return torch.load(file, map_location="meta", weights_only=True).untyped_storage()._checkpoint_offset is not None


@pytest.mark.skipif(not tells_offsets(), reason="this torch does not say where elements lie: chunks are loaded whole")
def test_memory(tmp_path):
    """A tensor that lies row-major goes through in bands."""
    path = save({"large": torch.ones(128 << 20, dtype=torch.uint8).view(16, -1)}, tmp_path / "dcp")
    options = RewriteOptions(num_ranks=2, dim=1, max_memory_bytes=16 << 20)
    import_dcp(path, tmp_path / "warm", options=options)
    taken = measure_memory(lambda: import_dcp(path, tmp_path / "c", options=options))
    assert taken < 24 << 20, f"{taken >> 20} MiB"
