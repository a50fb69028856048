"""Pickles of others: whatever they say, nothing is called or changed, and memory is in proportion to their bytes."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import itertools
import os
import pathlib
import pickle
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_states import limited_memory
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint import save as save_with_torch

from ferrodist.checkpoint import load_distributed
from ferrodist.checkpoint.convert import import_dcp, import_torch_file
from ferrodist.checkpoint.convert.dcp import _ALLOWED_GLOBALS, METADATA_NAME, decode_metadata
from ferrodist.checkpoint.convert.torch_pickle import check_pickles
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_CLASSES = [
    *(getattr(metadata, name) for name in _ALLOWED_GLOBALS[metadata.__name__]),
    filesystem._StorageInfo,
    torch.Size,
    dict,
    collections.OrderedDict,
    pathlib.PurePosixPath,
    pathlib.PosixPath,
]


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """No class is changed, and no more than some hundred MB are taken."""
    before = _contents()
    with limited_memory(1 << 30):
        yield
    assert _contents() == before


def _contents() -> list[dict[str, Any]]:
    """The fields of DCP's classes, except the entries of Python's pickle."""
    return [{name: value for name, value in vars(kind).items() if name != "__slotnames__"} for kind in _CLASSES]


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_SUFFIX = b"(N}" + _text("suffix") + _text("PWNED") + b"stb0N."

_HOSTILE = {
    "an attribute of a class": b"\x80\x04" + _named("pathlib", "PurePosixPath") + _SUFFIX,
    "an attribute of DCP's class": b"\x80\x04" + _named(metadata.__name__, "Metadata") + _SUFFIX,
    "an attribute of torch.Size": b"\x80\x04" + _named("torch", "Size") + _SUFFIX,
    "an attribute of a dtype": b"\x80\x04" + _named("torch", "float32") + _SUFFIX,
    "a method of a class": b"\x80\x04" + _named(filesystem.__name__, "_StorageInfo.__init__") + _SUFFIX,
    "a module of torch": b"\x80\x04" + _named("torch", "_inductor") + _SUFFIX,
    "a large memo": b"\x80\x04Nr" + struct.pack("<I", 120_000_000) + b".",
    "the largest memo": b"\x80\x04Nr" + struct.pack("<I", (1 << 32) - 1) + b".",
    "a memo in decimals": b"\x80\x04Np120000000\n.",
    "a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "a text of 4 GB": b"\x80\x04X" + struct.pack("<I", (1 << 32) - 1) + b"x.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "a long bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"x.",
    "a long int": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "an int in decimals": b"\x80\x04L" + b"9" * 1_000_000 + b"L\n.",
    "a long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a name without an end": b"\x80\x04c" + b"x" * 1_000_000,
    "a nest": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a nest of tuples": b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "marks": b"\x80\x04" + b"(" * 200_000 + b".",
    "what holds itself": b"\x80\x04]q\x00h\x00a.",
    "a list of 2**60": b"\x80\x04]" + b"2\x86" * 60 + b".",
    "nothing": b"",
    "only an end": b".",
    "an empty stack": b"\x80\x040.",
    "a protocol to come": b"\x80\x63N.",
    "a persistent id": b"\x80\x04NQ.",
    "an extension": b"\x80\x04\x82\x01.",
    "an instance": b"\x80\x04(iposix\nsystem\n.",
    "another class": b"\x80\x04" + _named("os", "system") + _text("true") + b"\x85R.",
}


@pytest.mark.parametrize("data", _HOSTILE.values(), ids=_HOSTILE)
def test_hostile_metadata(tmp_path: Path, data: bytes) -> None:
    """Each is DistCheckpointError, soon; what it wanted to change or fill is as it was."""
    (tmp_path / METADATA_NAME).write_bytes(data)
    with pytest.raises(DistCheckpointError, match=r"is not what torch\.distributed\.checkpoint writes"):
        import_dcp(tmp_path, tmp_path / "out")
    assert pathlib.PurePosixPath("a.txt").suffix == ".txt"


def _numbered(codes: bytes, form: str) -> st.SearchStrategy[bytes]:
    """Opcodes with a number behind them."""
    most = (1 << 8 * struct.calcsize(form)) - 1
    numbers = st.one_of(st.integers(0, 9), st.integers(0, most))
    return st.builds(lambda code, number: bytes([code]) + struct.pack(form, number), st.sampled_from(codes), numbers)


_PIECES = st.one_of(
    st.sampled_from([bytes([code]) for code in b"().]}NaestubRQ0123\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94l"]),
    st.sampled_from([_named(module, name) for module, names in _ALLOWED_GLOBALS.items() for name in names]),
    st.sampled_from([_named("torch", "Size"), _named("torch", "float32"), _named("os", "system")]),
    st.sampled_from(["fqn", "offset", "size", "chunks", "properties", "state_dict_metadata", "a", ""]).map(_text),
    _numbered(b"hqKC\x8c", "<B"),
    _numbered(b"rjBX", "<I"),
    _numbered(b"\x8d\x8e\x95", "<Q"),
    st.binary(max_size=8),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_PIECES, max_size=60))
def test_any_opcodes(pieces: list[bytes]) -> None:
    """Opcodes in any order are metadata or a ValueError, and no class is changed."""
    with contextlib.suppress(ValueError):
        decode_metadata(b"\x80\x04" + b"".join(pieces) + b".")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_metadata(data: st.DataObject) -> None:
    """torch's metadata with some bytes changed is metadata or a ValueError."""
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size([3]), [chunk])
    places = {metadata.MetadataIndex("a", [0]): filesystem._StorageInfo("__0_0.distcp", 0, 100)}
    whole = bytearray(pickle.dumps(metadata.Metadata({"a": tensor}, {"a": ("a",)}, places)))
    assert decode_metadata(bytes(whole)).tensors["a"] is not None
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        decode_metadata(bytes(whole))


def _archive(
    path: Path,
    state: bytes,
    *,
    name: str = "data.pkl",
    compression: int = zipfile.ZIP_STORED,
    storage: bytes = b"",
    copies: int = 0,
) -> Path:
    """A file as torch.save writes it, with any pickle, and more names of the storage's bytes."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"archive/{name}", state)
        archive.writestr("archive/byteorder", b"little", zipfile.ZIP_STORED)
        archive.writestr("archive/data/0", storage, zipfile.ZIP_STORED)
        archive.writestr("archive/version", b"3\n", zipfile.ZIP_STORED)
        found = archive.getinfo("archive/data/0")
        for number in range(1, copies + 1):
            entry = copy.copy(found)
            entry.filename = entry.orig_filename = f"archive/data/{number}"
            archive.filelist.append(entry)
    return path


def _tensor_of(num_elements: int, sizes: bytes, strides: bytes) -> bytes:
    storage = b"((" + _text("storage") + _named("torch", "FloatStorage") + _text("0") + _text("cpu")
    storage += b"J" + struct.pack("<i", num_elements) + b"tQ"
    ordered = _named("collections", "OrderedDict") + b")R"
    function = _named("torch._utils", "_rebuild_tensor_v2")
    return b"\x80\x02" + function + storage + b"K\x00" + sizes + strides + b"\x89" + ordered + b"tR."


_LARGE = b"\x8a\x05" + (10**10).to_bytes(5, "little")

_ALIKE = [b"\x8a\x0a" + (number * (2**61 - 1)).to_bytes(10, "little") for number in range(30_000)]
"""Numbers to which Python gives one hash: a dict or set of them would take minutes."""

_HOSTILE_STATES = {
    "a bytearray of a size": b"\x80\x02" + _named("__builtin__", "bytearray") + _LARGE + b"\x85R.",
    "the same in a subclass": b"\x80\x02" + _named("torch._tensor", "_rebuild_from_type_v2") + b"("
    + _named("__builtin__", "bytearray") + _named("torch", "Tensor") + _LARGE + b"\x85}tR.",
    "a storage of a size": b"\x80\x02" + _named("torch.storage", "UntypedStorage") + _LARGE + b"\x85R.",
    "a tensor of a size": b"\x80\x02" + _named("torch", "FloatTensor") + _LARGE + b"\x85R.",
    "a list of 2**60": b"\x80\x02]q\x00" + b"".join(b"]q\x01(h\x00h\x00eq\x00" for _ in range(60)) + b".",
    "a key of 2**60": b"\x80\x02}N" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "a set of 2**60": b"\x80\x02" + _named("__builtin__", "set") + b"]N" + b"q\x00h\x00\x86" * 60 + b"a\x85R.",
    "a text many times": b"\x80\x02(" + _text("x" * 500_000) + b"q\x00" + b"h\x00" * 200_000 + b"t.",
    "another encoding": b"\x80\x02" + _named("_codecs", "encode") + _text("x" * 9) + _text("punycode") + b"\x86R.",
    "elements outside": _tensor_of(1, b"J" + struct.pack("<i", 1 << 30) + b"\x85", b"K\x01\x85"),
    "a long storage": _tensor_of(1 << 30, b"J" + struct.pack("<i", 1 << 30) + b"\x85", b"K\x01\x85"),
    "a negative size": _tensor_of(1, b"J" + struct.pack("<i", -1) + b"\x85", b"K\x01\x85"),
    "what holds itself": b"\x80\x02]q\x00h\x00a.",
    "keys of one hash": b"\x80\x02}(" + b"N".join(_ALIKE) + b"Nu.",
    "members of one hash": b"\x80\x02" + _named("__builtin__", "set") + b"](" + b"".join(_ALIKE) + b"e\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("state", _HOSTILE_STATES.values(), ids=_HOSTILE_STATES)
def test_hostile_states(tmp_path: Path, state: bytes, is_zip: bool) -> None:
    """In a file of torch.save of either kind each is DistCheckpointError, soon."""
    if is_zip:
        _archive(tmp_path / "file.pt", state, storage=bytes(4))
    else:
        start = b"".join(pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        (tmp_path / "file.pt").write_bytes(start + state + pickle.dumps([], 2))
    with pytest.raises(DistCheckpointError, match=r"file\.pt"):
        import_torch_file(tmp_path / "file.pt", tmp_path / "out")


_ALIKE_SHAPES = [
    _named("torch", "Size") + b"(" + b"".join(sizes) + b"t\x85RN"
    for sizes in itertools.islice(itertools.product(_ALIKE[:4], repeat=8), 30_000)
]
_ALIKE_COMPLEX = [
    _named("builtins", "complex") + b"G" + struct.pack(">d", -1000003 * n) + b"G" + struct.pack(">d", n) + b"\x86RN"
    for n in range(30_000)
]

_STATES_OF_ONE_HASH = {
    "keys of one hash before a list": b"\x80\x02}(" + b"N".join(_ALIKE) + b"N]Nu.",
    "shapes of one hash": b"\x80\x02}(" + b"".join(_ALIKE_SHAPES) + b"u.",
    "shapes of one hash in tuples": b"\x80\x02}(" + b"".join(_ALIKE_SHAPES).replace(b"RN", b"R\x85N") + b"u.",
    "complex numbers of one hash": b"\x80\x02}(" + b"".join(_ALIKE_COMPLEX) + b"u.",
    "pairs with keys of one hash": b"\x80\x02" + _named("collections", "OrderedDict") + b"]("
    + b"N\x86".join(_ALIKE) + b"N\x86e\x85R.",
    "counted ones of one hash": b"\x80\x02" + _named("collections", "Counter")
    + b"](" + b"".join(_ALIKE) + b"e\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("state", _STATES_OF_ONE_HASH.values(), ids=_STATES_OF_ONE_HASH)
def test_values_of_one_hash(tmp_path: Path, state: bytes) -> None:
    """Dicts and sets that would take torch quadratic time are refused at once."""
    path = _archive(tmp_path / "file.pt", state)
    with path.open("rb") as file, pytest.raises(ValueError, match="with one hash"):
        check_pickles(file, path.stat().st_size)


def test_chunks_of_many_tensors(tmp_path: Path) -> None:
    """Metadata of some kB that would be GBs: many tensors share one list of many chunks, which is made for each."""
    chunks = [metadata.ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(3000)]
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size([3000]), chunks)
    data = pickle.dumps(metadata.Metadata({f"a{number}": tensor for number in range(30_000)}))
    (tmp_path / METADATA_NAME).write_bytes(data)
    with pytest.raises(DistCheckpointError, match="members when it is written out"):
        import_dcp(tmp_path, tmp_path / "out")


def test_chunks_of_one_hash() -> None:
    """Metadata whose chunks have offsets to which Python gives one hash is refused at once."""
    size, index = _named("torch", "Size"), _named(metadata.__name__, "MetadataIndex")
    place = _named(filesystem.__name__, "_StorageInfo") + b")\x81}(" + _text("relative_path") + _text("x")
    place += _text("offset") + b"K\x00" + _text("length") + b"K\x00ub"
    start = index + b")\x81}(" + _text("fqn") + _text("a") + _text("offset") + size
    places = [start + number + b"\x85\x85Rub" + place for number in _ALIKE[:2000]]
    data = b"\x80\x02" + _named(metadata.__name__, "Metadata") + b")\x81}(" + _text("state_dict_metadata") + b"}"
    whole = data + _text("storage_data") + b"}(%bu" + b"ub."
    assert len(decode_metadata(whole % b"".join(places[:50])).items) == 50
    with pytest.raises(ValueError, match="with one hash"):
        decode_metadata(whole % b"".join(places))


def test_sparse_files(tmp_path: Path) -> None:
    """Holes of a file, which cost nothing on a disk, allow for no more memory: texts, and what is written out."""
    state, file = _HOSTILE_STATES["a list of 2**60"].replace(b"]q\x01(h\x00h\x00eq\x00", b"", 34), tmp_path / "file.pt"
    for start in (b"\x80\x04\x8d" + struct.pack("<Q", 19 << 30), state):
        file.write_bytes(start)
        os.truncate(file, 20 << 30)
        with pytest.raises(DistCheckpointError, match=r"cut off|members when it is written out"):
            import_torch_file(file, tmp_path / "out")


def test_compressed_archives(tmp_path: Path) -> None:
    """A file of some MB whose state would be GBs: refused, for torch.save doesn't compress."""
    state = b"\x80\x02" + b"N0" * 50_000_000 + b"N."
    path = _archive(tmp_path / "file.pt", state, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DistCheckpointError, match="is compressed"):
        import_torch_file(path, tmp_path / "out")


def test_a_state_of_another_spelling(tmp_path: Path) -> None:
    """Torch finds DATA.PKL where it looks for data.pkl: it is looked through, too, and takes no memory."""
    path = _archive(tmp_path / "file.pt", _HOSTILE_STATES["a bytearray of a size"], name="DATA.PKL")
    assert torch.load(_archive(tmp_path / "good.pt", b"\x80\x02K\x05.", name="DATA.PKL"), weights_only=True) == 5
    with pytest.raises(DistCheckpointError, match="bytearray with a number"):
        import_torch_file(path, tmp_path / "out")


@pytest.mark.parametrize("seen_first", [False, True])
def test_archives_with_two_directories(tmp_path: Path, seen_first: bool) -> None:
    """Python finds one of a harmless state, and torch another one: it would load what was not looked through."""
    hostile = _HOSTILE_STATES["a bytearray of a size"]
    seen = _archive(tmp_path / "seen", b"\x80\x02N.".ljust(len(hostile))).read_bytes()
    loaded = _archive(tmp_path / "loaded", hostile).read_bytes()
    end = loaded[-22:]  # says where the directory begins
    data = loaded[:-22] + seen[:-22] + end
    if seen_first:  # the other one lies in a comment behind the end
        start = len(seen) + struct.unpack("<I", end[16:20])[0]
        comment = loaded[:-22]
        data = seen[:-22] + end[:16] + struct.pack("<IH", start, len(comment)) + comment
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(DistCheckpointError, match=r"its directory is not where torch\.save puts it|it is no archive"):
        import_torch_file(tmp_path / "file.pt", tmp_path / "out")


def test_records_in_the_same_bytes(tmp_path: Path) -> None:
    """A thousand records of 1 MB that lie in the same one would be 1 GB in memory."""
    path = _archive(tmp_path / "file.pt", b"\x80\x02N.", storage=bytes(1 << 20), copies=1000)
    assert path.stat().st_size < 2 << 20
    with pytest.raises(DistCheckpointError, match="its records are longer together than it is"):
        import_torch_file(path, tmp_path / "out")


def test_long_archives(tmp_path: Path) -> None:
    """The longer end that torch writes for archives of more than 65,535 records is read."""
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "file.pt"))  # what torch.save writes its records with
    writer.write_record("data.pkl", pickle.dumps({}, 2), len(pickle.dumps({}, 2)))
    for number in range(66_000):
        writer.write_record(f"data/{number}", b"data", 4)
    writer.write_end_of_file()
    with (tmp_path / "file.pt").open("rb") as file:
        check_pickles(file, (tmp_path / "file.pt").stat().st_size)


def test_hostile_items(tmp_path: Path) -> None:
    """A value in a DCP folder is looked through as a file of torch.save is."""
    save_with_torch({"a": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = _archive(tmp_path / "made", _HOSTILE_STATES["a bytearray of a size"]).read_bytes()
    found = pickle.loads((tmp_path / "dcp" / METADATA_NAME).read_bytes())
    for place in found.storage_data.values():
        place.offset, place.length = 0, len(data)
    (tmp_path / "dcp" / METADATA_NAME).write_bytes(pickle.dumps(found))
    file.write_bytes(data)
    with pytest.raises(DistCheckpointError, match="bytearray with a number"):
        import_dcp(tmp_path / "dcp", tmp_path / "out")


def test_all_that_torch_saves(tmp_path: Path) -> None:
    """Harmless kinds of values, dtypes and views are loaded as before, from both kinds of files."""
    dtypes = [torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float16]
    base = torch.arange(24.0)
    state: dict[str, Any] = {
        "dtypes": [torch.ones(3).to(dtype) for dtype in dtypes],
        "views": [base[5:7], base[::3], base.view(4, 6).T, base[3].expand(2, 2), base[:0], base.view(2, 3, 4)[1]],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "values": [None, True, 1, -(1 << 200), 1.5, 2j, "text", b"bytes", bytearray(b"more"), (1, (2,))],
        "keys": {3: 4, (5, 6): 7},
        "sets": {1, 2, (3, 4)},
        "counter": collections.Counter("aab"),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
    }  # fmt: skip
    shared = [1, 2, 3]
    state["shared"] = [shared] * 1000
    for is_zip in (False, True):
        if is_zip:  # the others have no name in the files of old
            state["dtypes"] += [torch.ones(3).to(each) for each in (torch.uint16, torch.uint64, torch.float8_e4m3fn)]
        torch.save(state, tmp_path / f"{is_zip}.pt", _use_new_zipfile_serialization=is_zip)
        import_torch_file(tmp_path / f"{is_zip}.pt", tmp_path / f"{is_zip}")
        loaded = load_distributed(tmp_path / f"{is_zip}")
        for key in ("dtypes", "views"):
            assert all(a.equal(b) for a, b in zip(loaded.pop(key), state[key], strict=True)), key
        assert loaded.pop("parameter").tolist() == [1.0, 1.0]
        rest = {key: value for key, value in state.items() if key in loaded}
        assert loaded == rest


def test_what_python_would_do() -> None:
    """The hostile pickles of these tests are ones that Python's unpickler runs."""
    data = b"\x80\x02" + _named("__builtin__", "bytearray") + b"K\x05\x85R."
    assert pickle.load(io.BytesIO(data)) == bytearray(5)
