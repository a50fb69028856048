"""A safe reader of pickles: an interpreter of pickle's opcodes that produces inert values.

Python's unpickler calls whatever a file names, sets attributes of the results, and sizes its memo by a number in the
file. This one looks up nothing, calls nothing, hashes nothing from the file, and takes memory in proportion to the
bytes read. A pickle becomes::

    None, bool, int, float, str, bytes, list, tuple      itself
    dict                                                 PickledDict
    a class or function                                  Global
    a call of one, or an object                          PickledCall
    a persistent id                                      PersistentId
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

from ferrodist.checkpoint.storage.base import MAX_SMALL_FILE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_PROTOCOL = 5
_BYTE, _SHORT, _INT, _WORD, _LONG, _FLOAT = map(struct.Struct, ("<B", "<H", "<i", "<I", "<Q", ">d"))
_MAX_NAME_BYTES = 1000
_MIN_MEMBERS = 1_000_000
_MEMBERS_PER_BYTE = 10


class Global(NamedTuple):
    """A class or function named by a pickle."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickledDict:
    """A dict's keys and values, in the file's order; a key may come twice."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PickledCall:
    """A call that a pickle requests, and its use of the result."""

    function: Global
    arguments: tuple[Any, ...]
    state: Any = None
    items: PickledDict = field(default_factory=PickledDict)


@dataclass(slots=True, eq=False)
class PersistentId:
    """A reference to an object outside of the pickle."""

    id: Any


def read_pickle(file: IO[bytes], size_bytes: int, check: Callable[[Global], None]) -> Any:
    """Read one pickle from a file's position up to its STOP; ValueError if it is none, or has unexpected opcodes.

    ``check`` raises ValueError for an unexpected class or function. Since sparse files are cheap, ``size_bytes`` is
    capped at `MAX_SMALL_FILE_BYTES`.
    """
    return _PickleMachine(file, min(size_bytes, MAX_SMALL_FILE_BYTES), check).run()


def members_of(value: Any) -> list[Any]:
    """Return the direct members of a value."""
    if isinstance(value, (list, tuple)) and not isinstance(value, Global):
        return list(value)
    if isinstance(value, PickledDict):
        return [each for pair in value.pairs for each in pair]
    if isinstance(value, PickledCall):
        return [value.arguments, value.state, value.items]
    return [value.id] if isinstance(value, PersistentId) else []


def check_expansion(value: Any, pickle_bytes: int) -> None:
    """Check that a value is in proportion to the bytes of its pickle when shared members are expanded."""
    check_expanded_size(value, max(_MIN_MEMBERS, _MEMBERS_PER_BYTE * pickle_bytes))


def check_expanded_size(value: Any, max_members: int) -> None:
    """Check the number of members of a value when shared members are expanded.

    A few bytes of pickle can encode a list of two lists, each of which is the same list of two, and so on. Strings and
    bytes count one more per 8 of them.
    """
    sizes: dict[int, int] = {}
    in_progress: set[int] = set()
    pending: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while pending:
        node, members = pending.pop()
        if members is None:
            if id(node) in sizes:
                continue
            if id(node) in in_progress:
                raise ValueError("it holds itself")
            members = members_of(node)
            in_progress.add(id(node))
            pending.append((node, members))
            pending += [(each, None) for each in members]
        else:
            in_progress.discard(id(node))
            own = len(node) // 8 if isinstance(node, (str, bytes)) else 0
            sizes[id(node)] = 1 + own + sum(sizes[id(each)] for each in members)
            if sizes[id(node)] > max_members:
                raise ValueError(f"it has more than {max_members} members when it is written out")


class _PickleMachine:
    """Pickle's stack machine, with inert values on its stack."""

    def __init__(self, file: IO[bytes], size_bytes: int, check: Callable[[Global], None]) -> None:
        self._file = file
        self._remaining = size_bytes
        self._check = check
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stacks below the marks."""
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value."""
        try:
            while (code := self._take(1)) != b".":
                operation = _OPERATIONS.get(code)
                if operation is None:
                    _refuse(f"opcode {code!r} doesn't belong there")
                operation(self)
            return self._stack.pop()
        except (IndexError, KeyError, AttributeError, TypeError, struct.error) as error:
            raise ValueError(f"it is no pickle: {error}") from error

    def _take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._remaining else b""
        if len(data) < count:
            _refuse("it is cut off")
        self._remaining -= count
        return data

    def _read_number(self, form: struct.Struct) -> int:
        found: int = form.unpack(self._take(form.size))[0]
        return found

    def _sized(self, form: struct.Struct) -> bytes:
        return self._take(self._read_number(form))

    def _line(self) -> str:
        line = self._file.readline(min(self._remaining, _MAX_NAME_BYTES))
        self._remaining -= len(line)
        if not line.endswith(b"\n"):
            _refuse("it has a name without an end")
        return line[:-1].decode()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _pop_mark(self) -> list[Any]:
        members, self._stack = self._stack, self._below.pop()
        return members

    def _protocol(self) -> None:
        if self._read_number(_BYTE) > _MAX_PROTOCOL:
            _refuse("it has a protocol that is not known here")

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            _refuse("it appends to a value that is not a list")
        target.extend(values)

    def _set_items(self, keys_and_values: list[Any]) -> None:
        target = self._stack[-1]
        if len(keys_and_values) % 2:
            _refuse("it has a key without a value")
        if isinstance(target, PickledCall):
            target = target.items
        if not isinstance(target, PickledDict):
            _refuse("it sets items of a value that is not a dict")
        target.pairs.extend(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))

    def _pop(self, count: int) -> list[Any]:
        members = self._stack[-count:]
        if len(members) < count:
            _refuse("its stack is empty")
        del self._stack[-count:]
        return members

    def _push_global(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str) and len(module) + len(name) <= _MAX_NAME_BYTES):
            _refuse("it names a class by an invalid name")
        found = Global(module, name)
        self._check(found)
        self._push(found)

    def _make(self) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, Global) or not isinstance(arguments, tuple) or isinstance(arguments, Global):
            _refuse("it calls a value that is not a class")
        self._push(PickledCall(function, arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, PickledCall) or target.state is not None:
            _refuse("it sets the state of a value that has none")
        target.state = state


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


_OPERATIONS: dict[bytes, Callable[[_PickleMachine], object]] = {
    b"\x80": _PickleMachine._protocol,
    b"\x95": lambda machine: machine._take(8),  # a frame's size, a hint for readers
    b"N": lambda machine: machine._push(None),
    b"\x88": lambda machine: machine._push(True),
    b"\x89": lambda machine: machine._push(False),
    b"J": lambda machine: machine._push(machine._read_number(_INT)),
    b"K": lambda machine: machine._push(machine._read_number(_BYTE)),
    b"M": lambda machine: machine._push(machine._read_number(_SHORT)),
    b"\x8a": lambda machine: machine._push(int.from_bytes(machine._sized(_BYTE), "little", signed=True)),
    b"G": lambda machine: machine._push(_FLOAT.unpack(machine._take(_FLOAT.size))[0]),
    b"X": lambda machine: machine._push(machine._sized(_WORD).decode()),
    b"\x8c": lambda machine: machine._push(machine._sized(_BYTE).decode()),
    b"\x8d": lambda machine: machine._push(machine._sized(_LONG).decode()),
    b"B": lambda machine: machine._push(machine._sized(_WORD)),
    b"C": lambda machine: machine._push(machine._sized(_BYTE)),
    b"U": lambda machine: machine._push(machine._sized(_BYTE)),
    b"\x8e": lambda machine: machine._push(machine._sized(_LONG)),
    b"(": _PickleMachine._mark,
    b"t": lambda machine: machine._push(tuple(machine._pop_mark())),
    b")": lambda machine: machine._push(()),
    b"\x85": lambda machine: machine._push(tuple(machine._pop(1))),
    b"\x86": lambda machine: machine._push(tuple(machine._pop(2))),
    b"\x87": lambda machine: machine._push(tuple(machine._pop(3))),
    b"]": lambda machine: machine._push([]),
    b"a": lambda machine: machine._append(machine._pop(1)),
    b"e": lambda machine: machine._append(machine._pop_mark()),
    b"}": lambda machine: machine._push(PickledDict()),
    b"s": lambda machine: machine._set_items(machine._pop(2)),
    b"u": lambda machine: machine._set_items(machine._pop_mark()),
    b"q": lambda machine: machine._memoize(machine._read_number(_BYTE)),
    b"r": lambda machine: machine._memoize(machine._read_number(_WORD)),
    b"\x94": lambda machine: machine._memoize(len(machine._memo)),
    b"h": lambda machine: machine._push(machine._memo[machine._read_number(_BYTE)]),
    b"j": lambda machine: machine._push(machine._memo[machine._read_number(_WORD)]),
    b"c": lambda machine: machine._push_global(machine._line(), machine._line()),
    b"\x93": lambda machine: machine._push_global(*machine._pop(2)),
    b"R": _PickleMachine._make,
    b"\x81": _PickleMachine._make,
    b"b": _PickleMachine._build,
    b"Q": lambda machine: machine._push(PersistentId(*machine._pop(1))),
}
"""Operations by opcode, for the opcodes that DCP and torch.save write."""
