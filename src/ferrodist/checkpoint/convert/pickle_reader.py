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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ferrodist.checkpoint.storage.base import MAX_SMALL_FILE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

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
    """Read one pickle from a file's position up to its STOP.

    Args:
        file: The file.
        size_bytes: The largest size of the pickle. Since sparse files are cheap, it is capped at
            `MAX_SMALL_FILE_BYTES`.
        check: Raises ValueError for an unexpected class or function.

    Raises:
        ValueError: The bytes are not a pickle, or have opcodes that these files don't use.
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
        self._left = size_bytes
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
                operation[0](self, operation[1])
            return self._stack.pop()
        except (IndexError, KeyError, AttributeError, TypeError, struct.error) as error:
            raise ValueError(f"it is no pickle: {error}") from error

    def _take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._left else b""
        if len(data) < count:
            _refuse("it is cut off")
        self._left -= count
        return data

    def _number(self, form: struct.Struct) -> int:
        found: int = form.unpack(self._take(form.size))[0]
        return found

    def _line(self) -> str:
        line = self._file.readline(min(self._left, _MAX_NAME_BYTES))
        self._left -= len(line)
        if not line.endswith(b"\n"):
            _refuse("it has a name without an end")
        return line[:-1].decode()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_mark(self) -> list[Any]:
        members, self._stack = self._stack, self._below.pop()
        return members

    # Values

    def _protocol(self, _: None) -> None:
        if self._number(_BYTE) > _MAX_PROTOCOL:
            _refuse("it has a protocol that is not known here")

    def _frame(self, _: None) -> None:
        self._take(8)  # a hint for readers

    def _int(self, form: struct.Struct) -> None:
        self._push(self._number(form))

    def _bytes(self, form: struct.Struct) -> None:
        self._push(self._take(self._number(form)))

    def _text(self, form: struct.Struct) -> None:
        self._push(self._take(self._number(form)).decode())

    def _long(self, _: None) -> None:
        self._push(int.from_bytes(self._take(self._number(_BYTE)), "little", signed=True))

    def _float(self, _: None) -> None:
        self._push(_FLOAT.unpack(self._take(_FLOAT.size))[0])

    # Containers

    def _new(self, kind: type) -> None:
        self._push(kind())

    def _mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _tuple(self, _: None) -> None:
        members = tuple(self._pop_mark())
        self._push(members)

    def _short_tuple(self, count: int) -> None:
        members = tuple(self._stack[-count:])
        if len(members) < count:
            _refuse("its stack is empty")
        del self._stack[-count:]
        self._push(members)

    def _append(self, _: None) -> None:
        value = self._stack.pop()
        self._list().append(value)

    def _appends(self, _: None) -> None:
        members = self._pop_mark()
        self._list().extend(members)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if not isinstance(target, list):
            _refuse("it appends to what is no list")
        return target

    def _set_item(self, _: None) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._pairs().append((key, value))

    def _set_items(self, _: None) -> None:
        members = self._pop_mark()
        if len(members) % 2:
            _refuse("it has a key without a value")
        self._pairs().extend(zip(members[::2], members[1::2], strict=True))

    def _pairs(self) -> list[tuple[Any, Any]]:
        target = self._stack[-1]
        if isinstance(target, PickledCall):
            target = target.items
        if not isinstance(target, PickledDict):
            _refuse("it sets items of what is no dict")
        return target.pairs

    # Memo

    def _put(self, form: struct.Struct) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def _memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, form: struct.Struct) -> None:
        self._push(self._memo[self._number(form)])

    # Classes and objects

    def _global(self, _: None) -> None:
        self._push_global(self._line(), self._line())

    def _stack_global(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_global(module, name)

    def _push_global(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str) and len(module) + len(name) <= _MAX_NAME_BYTES):
            _refuse("it names a class by what is no name")
        found = Global(module, name)
        self._check(found)
        self._push(found)

    def _make(self, _: None) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple) or isinstance(arguments, Global):
            _refuse("it calls what is no class")
        self._push(PickledCall(function, arguments))

    def _build(self, _: None) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, PickledCall) or target.state is not None:
            _refuse("it gives a state to what takes none")
        target.state = state

    def _persistent(self, _: None) -> None:
        self._push(PersistentId(self._stack.pop()))


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


_OPERATIONS: dict[bytes, tuple[Callable[..., None], Any]] = {
    b"\x80": (_PickleMachine._protocol, None),
    b"\x95": (_PickleMachine._frame, None),
    b"N": (_PickleMachine._push, None),
    b"\x88": (_PickleMachine._push, True),
    b"\x89": (_PickleMachine._push, False),
    b"J": (_PickleMachine._int, _INT),
    b"K": (_PickleMachine._int, _BYTE),
    b"M": (_PickleMachine._int, _SHORT),
    b"\x8a": (_PickleMachine._long, None),
    b"G": (_PickleMachine._float, None),
    b"X": (_PickleMachine._text, _WORD),
    b"\x8c": (_PickleMachine._text, _BYTE),
    b"\x8d": (_PickleMachine._text, _LONG),
    b"B": (_PickleMachine._bytes, _WORD),
    b"C": (_PickleMachine._bytes, _BYTE),
    b"U": (_PickleMachine._bytes, _BYTE),
    b"\x8e": (_PickleMachine._bytes, _LONG),
    b"(": (_PickleMachine._mark, None),
    b"t": (_PickleMachine._tuple, None),
    b")": (_PickleMachine._push, ()),
    b"\x85": (_PickleMachine._short_tuple, 1),
    b"\x86": (_PickleMachine._short_tuple, 2),
    b"\x87": (_PickleMachine._short_tuple, 3),
    b"]": (_PickleMachine._new, list),
    b"a": (_PickleMachine._append, None),
    b"e": (_PickleMachine._appends, None),
    b"}": (_PickleMachine._new, PickledDict),
    b"s": (_PickleMachine._set_item, None),
    b"u": (_PickleMachine._set_items, None),
    b"q": (_PickleMachine._put, _BYTE),
    b"r": (_PickleMachine._put, _WORD),
    b"\x94": (_PickleMachine._memoize, None),
    b"h": (_PickleMachine._get, _BYTE),
    b"j": (_PickleMachine._get, _WORD),
    b"c": (_PickleMachine._global, None),
    b"\x93": (_PickleMachine._stack_global, None),
    b"R": (_PickleMachine._make, None),
    b"\x81": (_PickleMachine._make, None),
    b"b": (_PickleMachine._build, None),
    b"Q": (_PickleMachine._persistent, None),
}
"""Methods and their arguments by opcode, for the opcodes that DCP and torch.save write."""
