"""Files of ``torch.save`` become checkpoints, and checkpoints such files."""

import collections
import errno
import io
import os
import pathlib
from unittest import mock

import numpy as np
import pytest
import torch
from offline_states import make_state, measure_memory, save_sharded, save_whole

from ferrodist.checkpoint import load_distributed
from ferrodist.checkpoint.convert import export_torch_file, import_torch_file, torch_file
from ferrodist.checkpoint.tools.diff import compare
from ferrodist.checkpoint.tools.rewrite import RewriteOptions
from ferrodist.checkpoint.tools.verify import verify
from ferrodist.errors import DistCheckpointError


def test_there_and_back(tmp_path):
    """All values and dtypes of a state, on the way through a file."""
    path = save_whole(tmp_path / "c")
    export_torch_file(path, tmp_path / "state.pt")
    import_torch_file(tmp_path / "state.pt", tmp_path / "back")
    assert verify(tmp_path / "back").is_sound
    assert compare(path, tmp_path / "back") == []


def test_torch_reads_it(tmp_path):
    """Sharded tensors are whole in the file; `PerRank` values are in a dict."""
    path = save_sharded(tmp_path / "c", 3)
    told = []
    export_torch_file(path, tmp_path / "state.pt", progress=lambda *done: told.append(done))
    loaded = torch.load(tmp_path / "state.pt")
    for name, tensor in make_state()["model"].items():
        torch.testing.assert_close(loaded["model"][name], tensor, rtol=0, atol=0)
    assert {key: loaded[key] for key in ("step", "losses")} == {key: make_state()[key] for key in ("step", "losses")}
    assert loaded["own"]["2"] == {"rank": 2, "noise": loaded["own"]["2"]["noise"]}
    assert loaded["own"]["2"]["noise"].tolist() == [2, 2, 2]
    assert told[-1][0] == told[-1][1] > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "state.pt"]


def test_numpy_values_are_exported_as_torchs(tmp_path):
    """Arrays become tensors, and numbers Python's, since ``torch.load`` refuses them otherwise."""
    path = save_whole(tmp_path / "c", {"array": np.arange(3), "number": np.float32(1.5), "all": (np.int8(3),)})
    export_torch_file(path, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert loaded["array"].tolist() == [0, 1, 2]
    assert (loaded["number"], loaded["all"]) == (1.5, (3,))


def test_imports_of_what_torch_wrote(tmp_path):
    """A module's and an optimizer's state, views, tied tensors and the old format."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    tied = torch.arange(12.0).view(3, 4)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": [tied, tied],
        "turned": tied.T,
        "part": tied[1:, ::2],
        "ordered": collections.OrderedDict(a=1),
    }
    for name, is_zip in (("new.pt", True), ("old.pt", False)):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=is_zip)
        import_torch_file(tmp_path / name, tmp_path / f"{name}-made", options=RewriteOptions(num_ranks=2))
        loaded = load_distributed(tmp_path / f"{name}-made")
        torch.testing.assert_close(loaded["model"], dict(state["model"]), rtol=0, atol=0)
        torch.testing.assert_close(loaded["optimizer"]["state"], state["optimizer"]["state"], rtol=0, atol=0)
        assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
        assert loaded["tied"][0] is loaded["tied"][1]
        assert loaded["turned"].equal(state["turned"])
        assert loaded["part"].equal(state["part"])
        assert loaded["ordered"] == {"a": 1}


def test_code_does_not_run(tmp_path):
    """A file that names a function is refused, and the function isn't called."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(DistCheckpointError, match=r"evil\.pt is no file of torch\.save, or has more .*mkdir"):
        import_torch_file(tmp_path / "evil.pt", tmp_path / "c")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["evil.pt"]


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.14 says it when it loads one
def test_wrong_files(tmp_path):
    """A missing file, another kind of file, a cut one, and one with unsupported values: a sentence for each."""
    with pytest.raises(DistCheckpointError, match=r"nowhere can't be read: .*No such file"):
        import_torch_file(tmp_path / "nowhere", tmp_path / "c")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DistCheckpointError, match="text is no file of torch"):
        import_torch_file(tmp_path / "text", tmp_path / "c")
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:2000])
    with pytest.raises(DistCheckpointError, match=r"cut\.pt"):
        import_torch_file(tmp_path / "cut.pt", tmp_path / "c")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(DistCheckpointError, match=r"sparse\.pt can't be made a checkpoint: \['a'\] is a torch.sparse"):
        import_torch_file(tmp_path / "sparse.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_failing_export(tmp_path, monkeypatch):
    """An older file stays, and nothing else does."""
    path = save_whole(tmp_path / "c")
    (tmp_path / "state.pt").write_text("older")

    def fail(state, file):
        file.write(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(DistCheckpointError, match=r"could not write .*state\.pt: .*No space left"):
        export_torch_file(path, tmp_path / "state.pt")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_file", mock.Mock(side_effect=RuntimeError("unable to mmap 8 bytes")))
        with pytest.raises(DistCheckpointError, match="has no room for the tensors: unable to mmap"):
            export_torch_file(path, tmp_path / "state.pt")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: fail(None, io.BytesIO()))
    with pytest.raises(DistCheckpointError, match="has no room for the tensors"):
        export_torch_file(path, tmp_path / "state.pt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "state.pt"]
    assert (tmp_path / "state.pt").read_text() == "older"
    with pytest.raises(DistCheckpointError, match="can't be written"):
        export_torch_file(path, tmp_path / "no folder" / "state.pt")


def test_an_export_follows_no_link_that_others_have_made(tmp_path, monkeypatch):
    """In a folder of many users a link in the place of the draft would have another file of this user overwritten."""
    path = save_whole(tmp_path / "c")
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(torch_file.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".state.pt.guessed").symlink_to(tmp_path / "mine")
    with pytest.raises(DistCheckpointError, match=r"could not write .*state\.pt: .*File exists"):
        export_torch_file(path, tmp_path / "state.pt")
    assert (tmp_path / "mine").read_text() == "mine"


def test_memory_of_exports(tmp_path):
    """Tensors are mapped: the process itself takes memory for row blocks only."""
    path = save_whole(tmp_path / "c", {"large": torch.ones(128 << 20, dtype=torch.uint8)})

    def anonymous():
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10

    before, seen = anonymous(), []
    export_torch_file(path, tmp_path / "state.pt", progress=lambda *_: seen.append(anonymous()))
    assert len(seen) > 5
    assert max(seen) - before < 48 << 20


def test_memory_of_imports(tmp_path):
    """A file is mapped, and what is mapped is not what the process needs; the rest is bands."""
    torch.save({"large": torch.ones(128 << 20, dtype=torch.uint8)}, tmp_path / "state.pt")
    options = RewriteOptions(max_memory_bytes=16 << 20)
    taken = measure_memory(lambda: import_torch_file(tmp_path / "state.pt", tmp_path / "c", options=options))
    assert taken < (128 << 20) + (40 << 20)  # with the buffers of a writer
