"""Checks of ``torch.save`` files before torch loads them.

With ``weights_only=True`` torch calls only functions that it knows to be harmless. Some of them still allocate as much
memory as a number in the file says, a compressed archive is larger than its file, and a few bytes can encode a value
with 2**50 members. Such files are refused here.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from typing import IO, TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.convert.pickle_reader import (
    Global,
    PersistentId,
    PickledCall,
    PickledDict,
    check_expanded_size,
    check_expansion,
    members_of,
    read_pickle,
)
from ferrodist.checkpoint.format.tree import check_collisions

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUM_LEGACY_PICKLES = 5
"""At the beginning of files of torch before 1.6: magic number, version, system info, state, and keys."""

# A zip archive's end, and what archives that may be long have before it: where their long end is, and this.
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_LONG_END = struct.Struct("<4sQ2H2I4Q")

_MAX_KEY_MEMBERS = 1000
_LATIN_1_NAMES = ("latin1", "latin-1")


def load_checked(file: IO[bytes], size_bytes: int, **options: Any) -> Any:
    """Check a file, then load it with `torch.load` and ``weights_only=True``."""
    check_pickles(file, size_bytes)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def check_pickles(file: IO[bytes], size_bytes: int) -> None:
    """Check that loading a file takes memory in proportion to its size."""
    start = file.read(4)
    file.seek(0)
    if start != b"PK\x03\x04":
        for _ in range(_NUM_LEGACY_PICKLES):
            _check_one_pickle(file, size_bytes, size_bytes)
        return
    try:
        with zipfile.ZipFile(file) as archive:
            _check_directory(file)
            entries = archive.infolist()
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"its record {entry.filename!r} is compressed, which torch.save does not do")
            if sum(entry.file_size for entry in entries) > size_bytes:
                raise ValueError("its records are longer together than it is")
            for entry in entries:
                # Compared as torch does, which also finds DATA.PKL.
                if entry.orig_filename.rpartition("/")[2].lower() == "data.pkl":
                    with archive.open(entry) as opened:
                        _check_one_pickle(opened, entry.file_size, size_bytes)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OverflowError, struct.error) as error:
        raise ValueError(f"it is no archive: {error}") from error


def _check_directory(file: IO[bytes]) -> None:
    """Check that an archive ends with its directory, at the offset that its end record names.

    If they differ, Python believes one and torch the other, and torch would load unchecked records.
    """
    at = file.seek(-_END.size, os.SEEK_END)
    signature, _, _, _, _, length, start, comment = _END.unpack(file.read(_END.size))
    is_right = signature == b"PK\x05\x06" and not comment
    file.seek(max(0, at - _LOCATOR.size))
    signature, _, end_offset, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
    if signature == b"PK\x06\x07":
        at = file.seek(max(0, at - _LOCATOR.size - _LONG_END.size))
        signature, *_, length, start = _LONG_END.unpack(file.read(_LONG_END.size))
        is_right &= signature == b"PK\x06\x06" and end_offset == at
    if not is_right or start + length != at:
        raise ValueError("its directory is not where torch.save puts it")


def _check_one_pickle(file: IO[bytes], max_bytes: int, size_bytes: int) -> None:
    """Check one pickle, from the file's position on."""
    start = file.tell()
    value = read_pickle(file, max_bytes, lambda _: None)
    check_expansion(value, file.tell() - start)
    for node in _walk(value):
        if isinstance(node, PickledDict):
            _check_hashable([key for key, _ in node.pairs])
        elif isinstance(node, PickledCall):
            _check_call(node.function, node.arguments)
        elif isinstance(node, PersistentId):
            _num_elements(node, size_bytes)


def _walk(value: Any) -> Iterator[Any]:
    """Yield all values in a value, each once."""
    seen: set[int] = set()
    pending = [value]
    keep_alive = []  # an id is one as long as its object lives
    while pending:
        node = pending.pop()
        if id(node) not in seen:
            seen.add(id(node))
            keep_alive.append(node)
            yield node
            pending += members_of(node)


def _check_call(function: Global, arguments: tuple[Any, ...]) -> None:
    """Raise ValueError for a call that allocates more memory than its arguments have."""
    if function.name == "_rebuild_from_type_v2" and len(arguments) > 2:
        called, _, given = arguments[:3]
        if isinstance(called, Global) and isinstance(given, tuple):
            _check_call(called, given)
    elif function.module in ("builtins", "__builtin__", "collections"):
        _check_builtin(function, arguments)
    elif function.name == "encode":
        if len(arguments) > 1 and arguments[1] not in _LATIN_1_NAMES:
            raise ValueError(f"it calls {function} for another encoding than latin1")
    elif function.module.partition(".")[0] == "torch":
        if function.name.endswith(("Tensor", "Storage")) and arguments:
            raise ValueError(f"it calls {function}, which torch.save does not do")
        if function.name.startswith("_rebuild") and arguments and isinstance(arguments[0], PersistentId):
            _check_tensor(arguments)


def _check_builtin(function: Global, arguments: tuple[Any, ...]) -> None:
    """The same for a type of Python."""
    if any(isinstance(each, (int, float)) for each in arguments) and function.name != "complex":
        raise ValueError(f"it calls {function} with a number")
    if function.name == "set":
        for each in arguments:
            _check_hashable(members_of(each))
    elif function.module == "collections":
        for each in filter(_is_sequence, arguments):  # of keys with values for an OrderedDict, of keys for a Counter
            has_pairs = function.name == "OrderedDict"
            _check_hashable([pair[0] if has_pairs and _is_sequence(pair) and pair else pair for pair in each])


def _check_hashable(values: list[Any]) -> None:
    """Check that a dict or set of the values takes no quadratic time."""
    found: list[Any] = []
    for each in values:
        check_expanded_size(each, _MAX_KEY_MEMBERS)
        value = _hash_key(each)
        with contextlib.suppress(TypeError):  # it has no hash: torch gives up there, after those before it
            hash(value)
            found.append(value)
    check_collisions(found)


def _hash_key(value: Any) -> Any:
    """Return a value with the hash that torch's value will have, as far as numbers determine it."""
    if isinstance(value, tuple) and not isinstance(value, Global):
        return tuple(map(_hash_key, value))
    if isinstance(value, PickledCall) and value.function == ("torch", "Size") and len(value.arguments) == 1:
        sizes = value.arguments[0]
        return _hash_key(tuple(sizes)) if _is_sequence(sizes) else value
    if isinstance(value, PickledCall) and value.function.name == "complex":
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # torch gives up there, too
            return complex(*value.arguments)
    return value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, Global)


def _check_tensor(arguments: tuple[Any, ...]) -> None:
    """Check that a tensor's elements are within its storage, which torch would enlarge."""
    storage, offset, sizes, strides = (*arguments, None, None, None)[:4]
    if isinstance(sizes, PickledCall) and sizes.function == ("torch", "Size") and len(sizes.arguments) == 1:
        sizes = sizes.arguments[0]
    values = [offset, *sizes, *strides] if isinstance(sizes, tuple) and isinstance(strides, tuple) else [None]
    if not all(isinstance(each, int) and each >= 0 for each in values) or len(sizes) != len(strides):
        raise ValueError("it has a tensor with an invalid shape")
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= _num_elements(storage, None):
        raise ValueError("it has a tensor with elements outside of its storage")


def _num_elements(storage: PersistentId, max_elements: int | None) -> int:
    """Return a storage's number of elements according to the file."""
    found = storage.id
    if isinstance(found, int):  # of a file that was begun elsewhere
        raise ValueError("it refers to a storage by number")  # noqa: TRY004 - of the file
    count = found[4] if isinstance(found, tuple) and len(found) > 4 else None
    if not isinstance(count, int) or count < 0 or (max_elements is not None and count > max_elements):
        raise ValueError("it has a storage that is longer than the file, or has no length")
    return count
