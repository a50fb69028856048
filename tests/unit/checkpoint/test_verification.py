"""`verify` finds whatever is wrong with a checkpoint, all of it, and only that."""

import json

import msgspec
import pytest
import torch
from offline_states import flip, save_sharded, save_whole

from ferrodist.checkpoint.format.manifest import decode_manifest, encode_manifest
from ferrodist.checkpoint.tools.verify import verify
from ferrodist.errors import DistCheckpointError


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint of three ranks."""
    return save_sharded(tmp_path / "c", 3)


def change_manifest(path, change):
    """Write another manifest, hashed as it should be."""
    file = path / "metadata.json"
    manifest = decode_manifest(file.read_bytes(), "here")
    change(manifest)
    file.write_bytes(encode_manifest(manifest))


def texts(report):
    return [str(problem) for problem in report.problems]


def test_sound_checkpoints_have_no_problems(sharded, tmp_path):
    """New checkpoints have no problems; all bytes are read and counted."""
    told = []
    report = verify(sharded, progress=lambda done, total: told.append((done, total)))
    size = sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
    assert report.is_sound
    assert (report.num_files, report.size_bytes, report.other_files) == (3, size, ())
    assert (told[0], told[-1]) == ((0, size), (size, size))
    assert verify(save_whole(tmp_path / "whole")).is_sound
    assert verify(save_whole(tmp_path / "no tensors", {"a": 1})).is_sound


def test_every_byte_counts(tmp_path):
    """A change of any byte of a checkpoint is found, and its tensor is named."""
    path = save_whole(tmp_path / "c", {"one": torch.arange(5), "two": torch.ones(3)})
    (file,) = path.glob("*.safetensors")
    starts = {key: tensor.shards[0].start for key, tensor in read(path).tensors.items()}
    for at in range(file.stat().st_size):
        flip(file, at)
        (problem, *_) = verify(path).problems
        assert problem.file == file.name
        if at >= min(starts.values()):
            assert problem.tensor == max((key for key in starts if starts[key] <= at), key=starts.__getitem__)
        flip(file, at)
    manifest = path / "metadata.json"
    for at in range(manifest.stat().st_size):
        flip(manifest, at)
        assert {problem.file for problem in verify(path).problems} == {"metadata.json"}
        flip(manifest, at)
    assert verify(path).is_sound


def read(path):
    return decode_manifest((path / "metadata.json").read_bytes(), "here")


def test_all_problems_at_once(sharded):
    """A missing file, a short one and a damaged one are all reported, with their tensors."""
    first, second, third = sorted(sharded.glob("*.safetensors"))
    first.unlink()
    flip(second, second.stat().st_size - 1)
    third.write_bytes(third.read_bytes()[:-1])
    report = verify(sharded)
    by_file = {name: [p for p in report.problems if p.file == name] for name in (first.name, second.name, third.name)}
    assert all(problem.what == "is missing" and problem.tensor for problem in by_file[first.name])
    (damaged,) = by_file[second.name]
    assert "hash" in damaged.what
    assert damaged.tensor is not None
    assert "bytes where" in by_file[third.name][0].what
    assert any("too short" in problem.what for problem in by_file[third.name])


def test_blocks_of_a_large_tensor(tmp_path):
    """Each block is checked by itself: two damaged ones of three are two problems."""
    path = save_whole(tmp_path / "c", {"large": torch.zeros(9 << 20, dtype=torch.uint8)})
    (file,) = path.glob("*.safetensors")
    begin = read(path).files[0].header_bytes
    flip(file, begin)
    flip(file, begin + (9 << 20) - 1)
    ranges = [(begin, begin + (4 << 20)), (begin + (8 << 20), begin + (9 << 20))]
    assert [problem.what for problem in verify(path).problems] == [
        f"bytes {start} to {stop} don't have the hash that they were saved with" for start, stop in ranges
    ]


def test_foreign_files_are_problems_or_listed(sharded):
    """Foreign tensors and leftovers of a killed save are problems; a note is none."""
    (sharded / "config.json").write_text("{}")
    (sharded / "model.safetensors").write_bytes(b"")
    (sharded / ".metadata.json.12-34").write_bytes(b"")
    (sharded / ".saving-0123456789ab").mkdir()
    report = verify(sharded)
    assert report.other_files == ("config.json",)
    assert [problem.file for problem in report.problems] == [".metadata.json.12-34", "model.safetensors", str(sharded)]


def test_the_index(sharded, tmp_path):
    """Folders of full tensors have Hugging Face's index, which agrees with the manifest; others have none."""
    whole = save_whole(tmp_path / "whole")
    index = whole / "model.safetensors.index.json"
    found = json.loads(index.read_bytes())
    (sharded / index.name).write_bytes(index.read_bytes())
    assert ["belongs to another checkpoint" in text for text in texts(verify(sharded))] == [True]
    found["weight_map"]["model.bias"] = "elsewhere.safetensors"
    index.write_text(json.dumps(found))
    assert ["doesn't agree with the manifest" in text for text in texts(verify(whole))] == [True]
    index.write_text("{")
    assert ["can't be read" in text for text in texts(verify(whole))] == [True]
    index.unlink()
    assert ["is missing" in text for text in texts(verify(whole))] == [True]


def test_headers_that_differ_from_the_manifest_are_problems(sharded):
    """A header with the right hash is compared with the manifest."""
    change_manifest(sharded, lambda manifest: setattr(manifest.tensors["model.weight"], "dtype", "int32"))
    problems = verify(sharded).problems
    assert {problem.tensor for problem in problems} == {"model.weight"}
    assert all("the header says" in problem.what for problem in problems)


def test_trees_must_refer_to_all_tensors(sharded):
    """The state and the table of tensors must have the same tensors."""
    change_manifest(sharded, lambda manifest: manifest.tree["dict"].pop("model"))
    found = texts(verify(sharded))
    assert "metadata.json, tensor 'model.bias': is a tensor that the state doesn't refer to" in found
    change_manifest(sharded, lambda manifest: manifest.tree["dict"].update(more={"tensor": "nowhere"}))
    (problem,) = texts(verify(sharded))
    assert "a state with tensor 'nowhere', of which nothing else is said" in problem


def test_gaps_and_overlaps_in_files_are_problems(tmp_path):
    """Readers of safetensors files require that each byte belongs to one tensor."""
    path = save_whole(tmp_path / "c", {"a": torch.ones(4), "b": torch.ones(4)})

    def same_place(manifest):
        shard = manifest.tensors["a"].shards[0]
        manifest.tensors["b"].shards[0] = msgspec.structs.replace(shard)

    change_manifest(path, same_place)
    found = texts(verify(path))
    assert any("are of two tensors" in text for text in found)
    assert any("belong to no tensor" in text for text in found)


def test_no_checkpoint(tmp_path):
    """There is nothing to check."""
    with pytest.raises(DistCheckpointError, match="nothing in it, or is not there"):
        verify(tmp_path / "nowhere")
    (tmp_path / "other").touch()
    with pytest.raises(DistCheckpointError, match=r"metadata\.json is missing"):
        verify(tmp_path)
