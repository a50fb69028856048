"""Hugging Face's folders become checkpoints, and checkpoints such folders."""

import contextlib
import gc
import json
import logging
import os
import struct

import pytest
import torch
from offline_states import make_state, measure_memory, save_sharded, save_whole
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ferrodist as fd
from ferrodist.checkpoint import load_distributed, save_distributed
from ferrodist.checkpoint.convert import export_hugging_face, hugging_face, import_hugging_face
from ferrodist.checkpoint.storage import LocalStorage, open_storage
from ferrodist.checkpoint.tools.diff import compare
from ferrodist.checkpoint.tools.rewrite import RewriteOptions
from ferrodist.checkpoint.tools.verify import verify
from ferrodist.errors import DistCheckpointError
from ferrodist.parallel.pipeline.split import split_sequential
from ferrodist.testing import run_ranks


def tensors():
    """Tensors of a model, in dtypes that these files support."""
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
    if (path / "model.safetensors").exists():
        assert not (path / "model.safetensors.index.json").exists()
        return load_file(path / "model.safetensors")
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


def test_a_part_whose_name_begins_with_another(tmp_path):
    """Keys may contain dots: the part is found, whichever key comes first."""
    save_distributed({"a": {"x": torch.zeros(2)}, "a.b": {"w": torch.ones(2)}}, tmp_path / "a")
    for part, name in (("a.b", "w"), ("a", "x")):
        export_hugging_face(tmp_path / "a", tmp_path / f"of {part}", part=part)
        assert list(load_file(tmp_path / f"of {part}" / "model.safetensors")) == [name]


def test_options_of_another_type(tmp_path):
    """Options that are no RewriteOptions, and a part that is no text, are refused before anything is written."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    for convert in (import_hugging_face, export_hugging_face):
        with pytest.raises(TypeError, match="options must be RewriteOptions or None, not dict"):
            convert(tmp_path, tmp_path / "b", options={"num_ranks": 2})
    with pytest.raises(TypeError, match="part must be text or None, not int"):
        export_hugging_face(tmp_path, tmp_path / "b", part=3)
    assert not (tmp_path / "b").exists()


def test_the_longest_header(tmp_path, monkeypatch):
    """The limit of a header is that of the other readers, without its length field."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    length = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    monkeypatch.setattr(hugging_face, "MAX_HEADER_BYTES", length)
    import_hugging_face(tmp_path, tmp_path / "b")


def test_no_such_part(tmp_path):
    """The error lists the existing parts."""
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


def twice(name, fields):
    """A header in which a name comes twice: of such some readers take the first, and others the last."""
    entries = ", ".join(
        json.dumps({name: {**fields, "data_offsets": [at, at + 4]}}).removeprefix("{").removesuffix("}")
        for at in (0, 4)
    )
    text = f"{{{entries}}}".encode()
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
        (
            header(
                {name: {"dtype": "U8", "shape": [8], "data_offsets": [at, at + 8]} for name, at in (("a", 0), ("b", 7))}
            )
            + bytes(15),
            "tensors 'a' and 'b' lie in the same bytes",
        ),
        (
            header({"b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}) + bytes(8),
            "the bytes before tensor 'b' belong to no tensor",
        ),
        (
            header({"b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}) + bytes(8),
            "its last 4 bytes belong to no tensor",
        ),
        (twice("a", {"dtype": "U8", "shape": [4]}) + bytes(8), "the bytes before tensor 'a' belong to no tensor"),
        (
            header({"a": {"dtype": "U8", "shape": [1] * 100_000, "data_offsets": [0, 1]}}) + bytes(1),
            "'a' has 100000 dims, and 64 are the most",
        ),
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
    """A missing folder, an empty one, one of ours, and folders with missing files or tensors."""
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
    import_hugging_face(path, tmp_path / "first", options=options)  # what is kept for the next file is counted once
    taken = measure_memory(lambda: import_hugging_face(path, tmp_path / "c", options=options))
    assert taken < 32 << 20, f"{taken >> 20} MiB"  # 18 to 28 by torch's version


def test_safetensors_reads_what_was_imported(tmp_path):
    """The checkpoint of a folder is such a folder."""
    import_hugging_face(write_folder(tmp_path / "hf", tensors()), tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    torch.testing.assert_close(load_file(file), tensors(), rtol=0, atol=0)


def names_in(path):
    return sorted(file.name for file in path.iterdir())


def test_one_file(tmp_path):
    """The file has Hugging Face's name, also when it is written again, and when another one is."""
    path = save_whole(tmp_path / "c", tensors())
    for value in (1, 2):
        export_hugging_face(path, tmp_path / "hf")
        assert names_in(tmp_path / "hf") == ["metadata.json", "model.safetensors"]
        assert verify(tmp_path / "hf").is_sound
        torch.testing.assert_close(load_file(tmp_path / "hf" / "model.safetensors"), load_distributed(path))
        torch.testing.assert_close(load_distributed(tmp_path / "hf"), load_distributed(path))
        save_whole(path, {**tensors(), "more": torch.full((3,), float(value))})
    export_hugging_face(path, tmp_path / "hf", options=RewriteOptions(max_file_bytes=1))
    assert "model.safetensors.index.json" in names_in(tmp_path / "hf")
    assert "model.safetensors" not in names_in(tmp_path / "hf")
    assert verify(tmp_path / "hf").is_sound
    export_hugging_face(path, tmp_path / "hf")
    assert names_in(tmp_path / "hf") == ["metadata.json", "model.safetensors"]
    assert compare(path, tmp_path / "hf") == []


def test_one_file_in_a_store(tmp_path):
    """The same where files are copied to their names."""
    path = save_whole(tmp_path / "c", tensors())
    for _ in range(2):
        export_hugging_face(path, "memory://one-file")
        assert open_storage("memory://one-file").list_names() == ["metadata.json", "model.safetensors"]
        assert verify("memory://one-file").is_sound


@pytest.mark.parametrize("method", ["publish", "put", "copy", "remove", "discard", "list_names", "size_bytes"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupted_export(tmp_path, monkeypatch, method, number):
    """Wherever it ends: the folder has the older state or the newer one, whole, and the next export tidies it."""
    older, newer = save_whole(tmp_path / "older", tensors()), save_whole(tmp_path / "newer", {"b": torch.ones(3)})
    export_hugging_face(older, tmp_path / "hf")
    original, calls = getattr(LocalStorage, method), []

    def die(storage, *args):
        calls.append(1)
        if storage.path.name == "hf" and len(calls) >= number:
            raise KeyboardInterrupt
        return original(storage, *args)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, method, die)
        with contextlib.suppress(KeyboardInterrupt):
            export_hugging_face(newer, tmp_path / "hf")
    gc.collect()  # what has died has no locks
    assert [] in (compare(older, tmp_path / "hf"), compare(newer, tmp_path / "hf"))
    export_hugging_face(newer, tmp_path / "hf")
    assert names_in(tmp_path / "hf") == ["metadata.json", "model.safetensors"]
    assert compare(newer, tmp_path / "hf") == []


def test_a_disk_without_links(tmp_path, monkeypatch, caplog):
    """The file keeps the name that it was written by, and the index names it; the log says so."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = save_whole(tmp_path / "c", tensors())
    with caplog.at_level(logging.WARNING, logger="ferrodist"):
        export_hugging_face(path, tmp_path / "hf")
    assert "is not called model.safetensors" in caplog.text
    assert verify(tmp_path / "hf").is_sound
    torch.testing.assert_close(read_folder(tmp_path / "hf"), tensors(), rtol=0, atol=0)


class Tied(torch.nn.Module):
    """A model whose embedding is its head, too, as in GPT-2, and a third name of it, as in T5."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.other = torch.nn.Embedding(8, 4)
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.other.weight = self.head.weight = self.table.weight


WRAPPERS = {
    "plain": lambda model, group: model,
    "DDP": fd.DDP,
    "FSDP": fd.FSDP,
    "FSDP of layers": lambda model, group: fd.FSDP(model, group, wrap=torch.nn.Linear),
    "DTensors": lambda model, group: fd.parallelize(
        model,
        fd.DeviceMesh(group, (-1,), ("t",)),
        {"table": fd.VocabularyParallel(), "other": fd.VocabularyParallel(), "head": fd.ColumnParallel()},
    ),
}


@pytest.mark.parametrize("name", ["table.weight", "head.weight", "other.weight"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_shared_parameters(tmp_path, wrap, name):
    """Such a folder has a shared parameter once, under any of its names; modules take it, and it is written once."""
    state = {name: torch.arange(32.0).view(8, 4), "middle.weight": torch.ones(4, 4), "middle.bias": torch.zeros(4)}
    import_hugging_face(write_folder(tmp_path / "hf", state), tmp_path / "c")

    def program(group):
        model = wrap(Tied(), group)
        load_distributed(tmp_path / "c", model, group=group)
        load_distributed(tmp_path / "c", {"middle.weight": torch.empty(4, 4)}, group=group)
        save_distributed(model, tmp_path / "saved", group=group)

    run_ranks(program, 2)
    export_hugging_face(tmp_path / "saved", tmp_path / "out")
    found = read_folder(tmp_path / "out")
    shared = [key for key in found if key.startswith(("table", "head", "other"))]
    assert len(shared) == 1
    assert found[shared[0]].equal(state[name])
    loaded = load_distributed(tmp_path / "c", Tied().state_dict())
    assert loaded["table.weight"].equal(state[name])
    assert loaded["head.weight"].equal(state[name])


def test_missing_tensors_of_a_model_with_tied_parameters(tmp_path):
    """A parameter under none of its names is missing; so is one that isn't tied."""
    import_hugging_face(write_folder(tmp_path / "hf", {"middle.weight": torch.ones(4, 4)}), tmp_path / "c")
    missing = r"lacks \['table\.weight'\], \['other\.weight'\], \['middle\.bias'\]"
    with pytest.raises(DistCheckpointError, match=missing):
        load_distributed(tmp_path / "c", Tied())


def test_shared_parameters_of_a_pipeline(tmp_path):
    """A stage that has the second name of a parameter takes what was saved under the first one."""
    state = {"0.weight": torch.arange(32.0).view(8, 4), "1.weight": torch.ones(4, 4), "1.bias": torch.zeros(4)}
    import_hugging_face(write_folder(tmp_path / "hf", state), tmp_path / "c")

    def program(group):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8, bias=False))
        model[2].weight = model[0].weight
        pipeline = fd.Pipeline(split_sequential(model, 2), group, 2)
        load_distributed(tmp_path / "c", pipeline, group=group)
        return dict(pipeline.state_dict())

    first, last = run_ranks(program, 2)
    assert first["0.weight"].equal(state["0.weight"])
    assert last["2.weight"].equal(state["0.weight"])
