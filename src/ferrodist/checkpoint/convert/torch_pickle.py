"""Files of ``torch.save``, looked through before torch loads them.

With ``weights_only=True`` torch calls nothing but functions that it knows to be harmless. Some of them still take what
memory a number in the file says, a compressed archive is larger than its file, and a few bytes can say a value that is
2**50 members when it is written out. Such files are refused here.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from typing import TYPE_CHECKING, Any

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
    from typing import IO

_NUM_LEGACY_PICKLES = 5
"""At the beginning of files that torch wrote before version 1.6: a number, a version, facts, the state, and keys."""

# A zip archive's end, and what archives that may be long have before it: where their long end is, and this.
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_LONG_END = struct.Struct("<4sQ2H2I4Q")

_MAX_KEY_MEMBERS = 1000
_LATIN_1_NAMES = ("latin1", "latin-1")


def load_checked(file: IO[bytes], size_bytes: int, **options: Any) -> Any:
    """What `torch.load` gives of a file that was looked through.

    Args:
        file: The file, at its beginning.
        size_bytes: Its size.
        options: For `torch.load`; ``weights_only`` is True.

    Raises:
        ValueError: The file has what would take more memory than it has bytes.
    """
    check_pickles(file, size_bytes)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def check_pickles(file: IO[bytes], size_bytes: int) -> None:
    """See that torch takes memory in proportion to a file when it loads it.

    Raises:
        ValueError: It would take more, or the file is none of `torch.save`.
    """
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
                # By the name that torch looks at, and as it does, which finds DATA.PKL, too.
                if entry.orig_filename.rpartition("/")[2].lower() == "data.pkl":
                    with archive.open(entry) as opened:
                        _check_one_pickle(opened, entry.file_size, size_bytes)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OverflowError, struct.error) as error:
        raise ValueError(f"it is no archive: {error}") from error


def _check_directory(file: IO[bytes]) -> None:
    """See that an archive ends with its directory, which is where its end says, and nothing else.

    Where these two differ, Python believes one and torch the other: it would load records that were not looked through.

    Raises:
        ValueError: They differ.
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


def _check_one_pickle(file: IO[bytes], most_bytes: int, size_bytes: int) -> None:
    """See to one pickle of a file, from where it stands."""
    start = file.tell()
    value = read_pickle(file, most_bytes, lambda _: None)
    check_expansion(value, file.tell() - start)
    for node in _walk(value):
        if isinstance(node, PickledDict):
            _check_hashable([key for key, _ in node.pairs])
        elif isinstance(node, PickledCall):
            _check_call(node.function, node.arguments)
        elif isinstance(node, PersistentId):
            _num_elements(node, size_bytes)


def _walk(value: Any) -> Iterator[Any]:
    """All values in a value, each once."""
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
    """See that a call takes no memory that its arguments don't have.

    Raises:
        ValueError: It does.
    """
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
    """See that Python can make values the keys of a dict or the members of a set in a time that fits their number."""
    found: list[Any] = []
    for each in values:
        check_expanded_size(each, _MAX_KEY_MEMBERS)
        value = _hash_key(each)
        with contextlib.suppress(TypeError):  # it has no hash: torch gives up there, after those before it
            hash(value)
            found.append(value)
    check_collisions(found)


def _hash_key(value: Any) -> Any:
    """What torch makes of a value that is hashed, as far as its hash is one of numbers."""
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
    """See that a tensor's elements are in its storage; torch would make the storage longer."""
    storage, offset, sizes, strides = (*arguments, None, None, None)[:4]
    if isinstance(sizes, PickledCall) and sizes.function == ("torch", "Size") and len(sizes.arguments) == 1:
        sizes = sizes.arguments[0]
    numbers = [offset, *sizes, *strides] if isinstance(sizes, tuple) and isinstance(strides, tuple) else [None]
    if not all(isinstance(each, int) and each >= 0 for each in numbers) or len(sizes) != len(strides):
        raise ValueError("it has a tensor of a shape that is none")
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= _num_elements(storage, None):
        raise ValueError("it has a tensor with elements outside of its storage")


def _num_elements(storage: PersistentId, most: int | None) -> int:
    """How many elements a storage has, as the file says."""
    found = storage.id
    if isinstance(found, int):  # of a file that was begun elsewhere
        raise ValueError("it refers to a storage by number")  # noqa: TRY004 - of the file
    count = found[4] if isinstance(found, tuple) and len(found) > 4 else None
    if not isinstance(count, int) or count < 0 or (most is not None and count > most):
        raise ValueError("it has a storage that is longer than the file, or none")
    return count
