"""Hugging Face's folders become checkpoints, and checkpoints such folders."""

import json
import struct

import pytest
import torch
from offline_states import make_state, measure_memory, save_sharded, save_whole
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ferrodist.checkpoint import load_distributed
from ferrodist.checkpoint.comparing import compare
from ferrodist.checkpoint.conversion import export_hugging_face, import_hugging_face
from ferrodist.checkpoint.rewriting import RewriteOptions
from ferrodist.checkpoint.verification import verify
from ferrodist.errors import DistCheckpointError


def tensors():
    """Of a model, in dtypes that these files know."""
    return {f"layer.{name}": each for name, each in make_state()["model"].items() if each.dtype != torch.complex128}


def write_folder(path, state, num_files=1):
    """As Hugging Face's tools do."""
    path.mkdir()
    if num_files == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(state.items())[number::num_files])
        save_file(part, path / file)
        places.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def read_folder(path):
    """As Hugging Face's tools do."""
    places = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in places.items():
        with safe_open(path / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_import(tmp_path, num_files, num_ranks):
    """One file, or several with an index, for any number of ranks."""
    path = write_folder(tmp_path / "hf", tensors(), num_files)
    import_hugging_face(path, tmp_path / "c", options=RewriteOptions(num_ranks=num_ranks))
    assert verify(tmp_path / "c").is_sound
    torch.testing.assert_close(load_distributed(tmp_path / "c"), tensors(), rtol=0, atol=0)


def test_into_a_model(tmp_path):
    """A module takes the imported tensors by their names."""
    model, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    import_hugging_face(write_folder(tmp_path / "hf", model.state_dict()), tmp_path / "c")
    load_distributed(tmp_path / "c", other)
    assert other.weight.equal(model.weight)


@pytest.mark.parametrize("part", ["model", None])
def test_export(tmp_path, part):
    """Tensors are whole and have the names that they have in the part."""
    path = save_sharded(tmp_path / "c", 3, weight=1)
    export_hugging_face(path, tmp_path / "hf", part=part, options=RewriteOptions(max_file_bytes=500))
    assert verify(tmp_path / "hf").is_sound
    found = read_folder(tmp_path / "hf")
    start = "" if part else "model."
    for name, tensor in make_state()["model"].items():
        if tensor.dtype != torch.complex128:
            assert found[f"{start}{name}"].equal(tensor)
    if part:
        assert len(found) == len(make_state()["model"])
        assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1


def test_there_and_back(tmp_path):
    """A folder that was exported is imported where it has lost its manifest."""
    path = save_whole(tmp_path / "c", tensors())
    export_hugging_face(path, tmp_path / "hf")
    (tmp_path / "hf" / "metadata.json").unlink()
    import_hugging_face(tmp_path / "hf", tmp_path / "back")
    assert compare(path, tmp_path / "back") == []


def test_tied_tensors_of_a_part(tmp_path):
    """A tensor that has its key from elsewhere in the state gets one of the part."""
    tied = torch.ones(3)
    path = save_whole(tmp_path / "c", {"a": {"x": tied}, "b": {"y": tied, "z.w": {"v": torch.zeros(2)}}})
    export_hugging_face(path, tmp_path / "hf", part="b")
    assert set(read_folder(tmp_path / "hf")) == {"y", "z.w.v"}
    export_hugging_face(path, tmp_path / "deep", part="b.z.w")
    assert set(read_folder(tmp_path / "deep")) == {"v"}


def test_no_such_part(tmp_path):
    """What there is, is told."""
    path = save_whole(tmp_path / "c")
    with pytest.raises(DistCheckpointError, match=r"has no part 'nothing'; there is model, step, losses, numbered"):
        export_hugging_face(path, tmp_path / "hf", part="nothing")
    with pytest.raises(DistCheckpointError, match="has no tensors in 'numbered'"):
        export_hugging_face(path, tmp_path / "hf", part="numbered")
    with pytest.raises(ValueError, match="exported whole"):
        export_hugging_face(path, tmp_path / "hf", options=RewriteOptions(num_ranks=2))
    assert not (tmp_path / "hf").exists()


def header(entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\xff" * 20, "its header is longer than it is"),
        (struct.pack("<Q", 4) + b"nope", "its header can't be read"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "tensor 'a' ends after its end"),
        (
            header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(4),
            "'a' of shape .* has 4 bytes",
        ),
        (header({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4), "the dtype 'F3'"),
        (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + bytes(4), "has 4 bytes"),
        (header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}) + bytes(4), "shape"),
        (header({"a": 5}), "its header can't be read"),
    ],
)
def test_damaged_files(tmp_path, data, message):
    """A sentence for each, which names the file."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(data)
    with pytest.raises(DistCheckpointError, match=message):
        import_hugging_face(tmp_path / "hf", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_wrong_folders(tmp_path):
    """None, an empty one, one of ours, and such with missing files or tensors."""
    with pytest.raises(DistCheckpointError, match=r"has neither model\.safetensors nor"):
        import_hugging_face(tmp_path / "nowhere", tmp_path / "c")
    with pytest.raises(DistCheckpointError, match="is a checkpoint of ferrodist already"):
        import_hugging_face(save_whole(tmp_path / "ours"), tmp_path / "c")
    path = write_folder(tmp_path / "hf", tensors(), 2)
    file = path / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    save_file({"other": torch.ones(1)}, file)
    with pytest.raises(DistCheckpointError, match=r"model-00002-of-00002\.safetensors lacks tensor 'layer"):
        import_hugging_face(path, tmp_path / "c")
    file.unlink()
    with pytest.raises(DistCheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        import_hugging_face(path, tmp_path / "c")
    file.write_bytes(whole)
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DistCheckpointError, match="can't be made a checkpoint"):
        import_hugging_face(path, tmp_path / "c")


def test_memory(tmp_path):
    """Tensors go through in bands."""
    path = write_folder(tmp_path / "hf", {"large": torch.ones(128 << 20, dtype=torch.uint8).view(16, -1)})
    options = RewriteOptions(num_ranks=2, dim=1, max_memory_bytes=16 << 20)
    taken = measure_memory(lambda: import_hugging_face(path, tmp_path / "c", options=options))
    assert taken < 32 << 20, f"{taken >> 20} MiB"  # 18 to 28 by torch's version


def test_safetensors_reads_what_was_imported(tmp_path):
    """The checkpoint of a folder is such a folder."""
    import_hugging_face(write_folder(tmp_path / "hf", tensors()), tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    torch.testing.assert_close(load_file(file), tensors(), rtol=0, atol=0)
