"""Readers of arbitrary folders end soon, with little memory, with `DistCheckpointError` or a problem."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from offline_states import limited_memory, make_state, save_sharded, save_whole

from ferrodist.checkpoint import (
    DistributedCheckpoint,
    compare,
    find_latest,
    inspect_checkpoint,
    load_distributed,
    reshard,
    verify,
)
from ferrodist.checkpoint.convert import (
    export_dcp,
    export_hugging_face,
    export_torch_file,
    import_dcp,
    import_hugging_face,
    import_torch_file,
)
from ferrodist.checkpoint.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    decode_manifest,
    encode_manifest,
    hash_bytes,
)
from ferrodist.checkpoint.format.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_NUM_CHANGES = int(os.environ.get("FERRODIST_CHANGES", "40"))
"""The number of changes of each file by the tests."""


def _readers(path: Path, out: Path) -> dict[str, Callable[[], object]]:
    """All that reads a checkpoint."""
    return {
        "verify": lambda: verify(path),
        "inspect": lambda: inspect_checkpoint(path),
        "load": lambda: load_distributed(path, timeout=20),
        "open": lambda: DistributedCheckpoint(path).shard_metadata,
        "compare": lambda: compare(path, path),
        "reshard": lambda: reshard(path, out / "r", num_ranks=2),
        "dcp": lambda: export_dcp(path, out / "d"),
        "hf": lambda: export_hugging_face(path, out / "h", part="model"),
        "torch": lambda: export_torch_file(path, out / "t.pt"),
    }


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """No more than some hundred MB beyond what the process has."""
    with limited_memory(1 << 30):
        yield


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder for the results of conversions."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _change(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are damaged in one of several ways."""
    changed = bytearray(data)
    way = rng.randrange(5)
    if way == 0 or not changed:
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    at = rng.randrange(len(changed))
    if way == 1:
        changed[at] ^= 1 << rng.randrange(8)
    elif way == 2:
        changed[at : at + 8] = rng.randbytes(8)
    elif way == 3:
        del changed[at : at + rng.randrange(1, 50)]
    else:
        changed[at:at] = changed[rng.randrange(len(changed)) :][: rng.randrange(1, 50)]
    return bytes(changed)


_WRONG: list[Any] = [None, True, -1, 1 << 40, 1 << 62, 1e300, "", "x", "\x00", [], [1], [[]], {}, {"dict": 1}]


def _change_json(value: Any, rng: random.Random) -> Any:
    """A JSON value in which one place has another value."""
    if rng.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(_WRONG)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {f"{each}{'x' * (each == key)}": member for each, member in value.items()}
        return {**value, key: _change_json(value[key], rng)}
    at = rng.randrange(len(value))
    return [*value[:at], _change_json(value[at], rng), *value[at + 1 :]]


def _with_body(body: object) -> bytes:
    """A manifest with a hash that fits."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return b'{"format":"ferrodist-checkpoint","version":1,"hash":"%s","checkpoint":%s}\n' % (
        hash_bytes(text).encode(),
        text,
    )


def _run_all(path: Path, out: Path, what: str) -> None:
    """Each reader ends well, or raises DistCheckpointError."""
    for name, read in _readers(path, out).items():
        try:
            read()
        except DistCheckpointError:
            pass
        except Exception as error:
            raise AssertionError(f"{name} of {what} raised {error!r}") from error
        for made in out.iterdir():
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    find_latest(path.parent)


def test_changed_bytes(tmp_path: Path, out: Path) -> None:
    """Each file, with bytes flipped, lost, and in other places: no reader raises an error of its own."""
    rng = random.Random(25)
    path = save_whole(tmp_path / "c", {"model": {"a": torch.arange(5.0), "b": torch.ones(2, 2)}, "n": [1, (2.5, b"x")]})
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for number in range(_NUM_CHANGES // 2):
            file.write_bytes(_change(data, rng))
            _run_all(path, out, f"{file.name}, change {number}")
            assert verify(path).is_sound == (file.read_bytes() == data) or file.name == INDEX_NAME
        file.write_bytes(data)


def test_changed_values_with_right_hashes(tmp_path: Path, out: Path) -> None:
    """A manifest of any values, whose hash fits: no reader raises an error of its own."""
    rng = random.Random(26)
    path = save_sharded(tmp_path / "c", 2)
    file = path / MANIFEST_NAME
    body = json.loads(file.read_bytes())["checkpoint"]
    for number in range(_NUM_CHANGES):
        file.write_bytes(_with_body(_change_json(body, rng)))
        _run_all(path, out, f"change {number}: {file.read_bytes()[:2000]!r}")


@pytest.mark.parametrize(
    "node",
    [
        {"number": []},
        {"number": ["int8"]},
        {"number": ["int8", 3000]},
        {"number": ["int8", {"bytes": ""}]},
        {"number": ["float32", [1, 2]]},
        {"complex": []},
        {"complex": [1, "x"]},
        {"complex": [1] * 3},
        {"counter": [[1]]},
        {"counter": 3},
        {"bytes": "\u00e9"},
        {"int": "0x" + "f" * 9000 + "g"},
        {"device": 1},
        {"device": "nonsense"},
        {"dtype": []},
        {"float": {}},
        {"tuple": 3},
        {"pairs": [[{"tuple": [[1]]}, 1]]},
        {"per_rank": {"\u0663": 1}},
        {"size": [1 << 70]},
    ],
    ids=str,
)
def test_invalid_leaves_are_refused(tmp_path: Path, out: Path, node: object) -> None:
    """A value that can't be read is DistCheckpointError from all readers, and a problem for `verify`."""
    path = save_whole(tmp_path / "c", {"a": torch.ones(2), "b": 1})
    body = json.loads((path / MANIFEST_NAME).read_bytes())["checkpoint"]
    body["tree"]["dict"]["b"] = node
    (path / MANIFEST_NAME).write_bytes(_with_body(body))
    _run_all(path, out, str(node))
    with pytest.raises(DistCheckpointError):
        DistributedCheckpoint(path)
    assert not verify(path).is_sound


def test_very_large_ints_are_shown(tmp_path: Path) -> None:
    """An int of many thousand digits is saved, loaded, inspected and compared."""
    one = save_whole(tmp_path / "one", {"a": 1 << 100_000, "b": (2 << 50_000, "x")})
    two = save_whole(tmp_path / "two", {"a": 1 << 100_001, "b": (2 << 50_000, "x")})
    assert load_distributed(one) == {"a": 1 << 100_000, "b": (2 << 50_000, "x")}
    assert "0x1000" in str(inspect_checkpoint(one).state[1].value)
    assert [each.place for each in compare(one, two)] == ["['a']"]


@pytest.mark.parametrize(
    ("field", "value"), [("created_ns", -1), ("created_ns", 1 << 63), ("created_ns", 10**30), ("block_bytes", 1 << 40)]
)
def test_huge_numbers_are_refused(tmp_path: Path, out: Path, field: str, value: int) -> None:
    """Times beyond any calendar, and blocks beyond any memory, are refused when the manifest is read."""
    path = save_whole(tmp_path / "c", {"a": torch.ones(2)})
    body = json.loads((path / MANIFEST_NAME).read_bytes())["checkpoint"]
    (path / MANIFEST_NAME).write_bytes(_with_body({**body, field: value}))
    _run_all(path, out, field)
    with pytest.raises(DistCheckpointError, match="no manifest"):
        DistributedCheckpoint(path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


_NO_FILES = {
    "fifo": _fifo,
    "socket": _socket,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


def _ends(what: Callable[[], object]) -> BaseException | None:
    """Return the error of a call that must not block."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            what()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert raised, "it blocks"
    return raised[0]


@pytest.mark.parametrize("make", _NO_FILES.values(), ids=_NO_FILES)
def test_special_files_are_refused(tmp_path: Path, out: Path, make: Callable[[Path], None]) -> None:
    """A FIFO, a socket, a device or a folder in place of each file of a checkpoint is an error at once."""
    path = save_whole(tmp_path / "c", {"model": {"a": torch.arange(5.0)}})
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        file.unlink()
        make(file)
        for name, read in _readers(path, out).items():
            error = _ends(read)
            assert error is None or isinstance(error, DistCheckpointError), f"{name}, {file.name}: {error!r}"
            if file.name != INDEX_NAME:
                assert error is not None or name in ("verify", "inspect", "open"), f"{name} of {file.name}"
        _ends(lambda: find_latest(tmp_path))
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink()
        file.write_bytes(data)
    assert verify(path).is_sound


@pytest.mark.parametrize("make", _NO_FILES.values(), ids=_NO_FILES)
def test_imports_of_special_files_are_refused(tmp_path: Path, out: Path, make: Callable[[Path], None]) -> None:
    """The same in place of files of other formats."""
    for name in ("model.safetensors", INDEX_NAME):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        (tmp_path / "hf").mkdir()
        make(tmp_path / "hf" / name)
        assert isinstance(_ends(lambda: import_hugging_face(tmp_path / "hf", out / "c")), DistCheckpointError)
    state = {"a": torch.ones(3), "b": "text"}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for file in sorted((tmp_path / "dcp").iterdir()):
        data = file.read_bytes()
        file.unlink()
        make(file)
        assert isinstance(_ends(lambda: import_dcp(tmp_path / "dcp", out / "c")), DistCheckpointError)
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
        file.write_bytes(data)
    make(tmp_path / "file.pt")
    assert isinstance(_ends(lambda: import_torch_file(tmp_path / "file.pt", out / "c")), DistCheckpointError)


def test_sparse_files(tmp_path: Path, out: Path) -> None:
    """Files that say they are longer than any memory take none: manifests, headers, indices, metadata."""
    path = save_whole(tmp_path / "c", {"model": {"a": torch.arange(5.0)}})
    (file,) = path.glob("*.safetensors")
    manifest = decode_manifest((path / MANIFEST_NAME).read_bytes(), "here")
    whole = (path / MANIFEST_NAME).read_bytes()
    os.truncate(path / MANIFEST_NAME, 40 << 30)
    _run_all(path, out, "a long manifest")
    os.truncate(file, 40 << 30)
    manifest.files[0].size_bytes, manifest.files[0].header_bytes = 40 << 30, 3 << 30
    for shard in manifest.tensors["model.a"].shards:
        shard.start, shard.stop = 4 << 30, (4 << 30) + 20
    (path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    _run_all(path, out, "a long header")
    with pytest.raises(DistCheckpointError, match="header of 3221225472"):
        load_distributed(path)
    (path / MANIFEST_NAME).write_bytes(whole)
    os.truncate(path / INDEX_NAME, 40 << 30)
    _run_all(path, out, "a long index")
    for name in ("model.safetensors", INDEX_NAME, ".metadata"):
        folder = tmp_path / f"for {name}"
        folder.mkdir()
        (folder / name).write_bytes((MAX_HEADER_BYTES * 20).to_bytes(LENGTH_BYTES, "little"))
        os.truncate(folder / name, 40 << 30)
        run = import_dcp if name == ".metadata" else import_hugging_face
        with pytest.raises(DistCheckpointError):
            run(folder, out / "c")


def test_changed_bytes_of_other_formats(tmp_path: Path, out: Path) -> None:
    """Imports of damaged folders and files in other formats succeed, or raise DistCheckpointError."""
    rng = random.Random(27)
    state = {"a": torch.arange(6.0), "b": torch.ones(2, 2).bfloat16()}
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(state, tmp_path / "hf" / "part.safetensors")
    (tmp_path / "hf" / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(state, "part.safetensors")}))
    dcp.save(state | {"n": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "pt").mkdir()
    torch.save(state | {"n": 3}, tmp_path / "pt" / "file.pt")
    torch.save(state, tmp_path / "pt" / "old.pt", _use_new_zipfile_serialization=False)
    for folder in ("hf", "dcp", "pt"):
        for file in sorted((tmp_path / folder).iterdir()):
            data = file.read_bytes()
            for number in range(_NUM_CHANGES // 2):
                file.write_bytes(_change(data, rng))
                source = file if folder == "pt" else file.parent
                run = {"hf": import_hugging_face, "dcp": import_dcp, "pt": import_torch_file}[folder]
                try:
                    run(source, out / "c")
                except DistCheckpointError:
                    pass
                except Exception as error:
                    raise AssertionError(f"{folder}/{file.name}, change {number}: {error!r}") from error
            file.write_bytes(data)


@pytest.mark.parametrize("num_ranks", [0, -1, True, 1.0, "2"])
def test_metadata_with_an_invalid_number_of_ranks(num_ranks: Any) -> None:
    """An invalid number of ranks is refused, with its place."""
    with pytest.raises((TypeError, ValueError), match="num_ranks must be"):
        ShardMetadata(num_ranks=num_ranks)


def test_make_state_is_sound(tmp_path: Path, out: Path) -> None:
    """The readers of these tests read a sound checkpoint without an error."""
    path = save_whole(tmp_path / "c", {"model": make_state()["model"]})
    for read in _readers(path, out).values():
        read()
