"""Objects: what arrives as what, what is refused, and how a call is named to ranks that called something else."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend


@dataclasses.dataclass(frozen=True)
class _Point:
    x: int
    _y: object = 0.5


@dataclasses.dataclass(slots=True)
class _Slotted:
    x: int
    y: int = 0


class _Struct(msgspec.Struct, frozen=True):
    x: int
    y: object | msgspec.UnsetType = msgspec.UNSET


class _Row(msgspec.Struct, array_like=True):
    x: int
    y: int


class _Color(enum.Enum):
    RED = 1


class _Level(enum.IntEnum):
    HIGH = 3


class _Word(str, enum.Enum):
    A = "a"


_Pair = collections.namedtuple("_Pair", "a b")  # noqa: PYI024 - such as users have

_PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**64 - 1,
    1.5,
    float("inf"),
    "é\0",
    b"\0\xff",
    [],
    [1, [None, "a", [b"x"]]],
    {},
    {"a": {2: 2, None: 3, True: 4, 1.5: 5, b"k": 6, "k": [7]}},
    {(): 0, (1, "a", (2.5, None)): 1},
    [{"a": [{}]}] * 3,
]

_CHANGED: list[tuple[Any, Any]] = [
    ((1, (2, [3])), [1, [2, [3]]]),
    (_Pair(1, 2), [1, 2]),
    (torch.Size([2, 3]), [2, 3]),
    (collections.OrderedDict(a=1), {"a": 1}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    ({_Pair(1, 2): 3}, {(1, 2): 3}),
    (_Point(1), {"x": 1, "_y": 0.5}),
    (_Slotted(1), {"x": 1, "y": 0}),
    (_Struct(1), {"x": 1}),
    (_Struct(1, (2, _Point(3))), {"x": 1, "y": [2, {"x": 3, "_y": 0.5}]}),
    (_Row(1, 2), [1, 2]),
]

_REFUSED: list[Any] = [
    dt.datetime(2020, 1, 1),
    dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
    dt.date(2020, 1, 1),
    dt.time(1, 2),
    dt.timedelta(days=1),
    uuid.UUID(int=5),
    decimal.Decimal("1.5"),
    Fraction(1, 2),
    _Color.RED,
    _Level.HIGH,
    _Word.A,
    {1, 2},
    frozenset([1]),
    bytearray(b"x"),
    memoryview(b"x"),
    msgspec.Raw(b"\x01"),
    msgspec.msgpack.Ext(1, b"x"),
    msgspec.UNSET,
    np.datetime64("2020-01-01"),
    np.timedelta64(1, "ns"),
    np.complex64(1j),
    np.longdouble(1.5),
    np.zeros(2),
    torch.ones(2),
    2**64,
    -(2**63) - 1,
    1j,
    "\ud800",
    range(3),
    collections.deque([1]),
    object(),
    ValueError("x"),
    print,
    int,
]

_REFUSED_KEYS: list[Any] = [
    frozenset([1]),
    dt.date(2020, 1, 1),
    _Color.RED,
    _Level.HIGH,
    _Point(1),
    _Struct(1),
    (1, (_Color.RED,)),
    (_Point(1),),
]


def _and_type(value: Any) -> Any:
    """A value with the types of all its parts, which == leaves out: True is 1."""
    if isinstance(value, dict):
        return dict, [(_and_type(key), _and_type(other)) for key, other in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_and_type(other) for other in value]
    return type(value), value


_SCALARS: list[Any] = [
    np.float16(0.1),
    np.float32(0.1),
    np.float64(0.1),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.str_("text"),
    np.bytes_(b"bytes"),
]


def test_numpy_scalars_arrive_equal() -> None:
    """Rewards, flags and counts of environments go as they are: alone, nested, and as keys; as Python's values."""

    def on_rank(group: Backend) -> None:
        for value in (*_SCALARS, _SCALARS, {"a": _SCALARS}, dict.fromkeys(_SCALARS, 1), {(_SCALARS[0], 1): 2}):
            got = fd.all_gather_object(value)
            assert got == [value] * 2
        assert [type(each) for each in fd.broadcast_object(_SCALARS)] == [float] * 3 + [int] * 2 + [bool, str, bytes]

    run_ranks(on_rank, 2)


def test_plain_data_comes_back_as_itself() -> None:
    """Everything that is said to, alone and nested, on the other rank and on the one that has it."""

    def on_rank(group: Backend) -> None:
        for value in (*_PLAIN, _PLAIN, {"all": _PLAIN}):
            got = fd.broadcast_object(value if group.rank == 0 else "not read")
            assert _and_type(got) == _and_type(value)

    run_ranks(on_rank, 2)


def test_what_arrives_as_something_plainer() -> None:
    """Tuples, named tuples, subclasses, dataclasses and structs arrive as the table says, alone and nested."""

    def on_rank(group: Backend) -> None:
        del group
        for value, plainer in _CHANGED:
            for sent, expected in ((value, plainer), ([{"a": value}], [{"a": plainer}])):
                for got in fd.all_gather_object(sent):
                    assert _and_type(got) == _and_type(expected)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("value", _REFUSED, ids=lambda value: type(value).__name__)
def test_what_would_arrive_as_something_else_is_refused(value: Any) -> None:
    """TypeError before anything is sent, wherever in the object it is; the group goes on."""
    around = [value, [1, value], (value,), {"a": {"b": value}}]
    if value is not msgspec.UNSET:  # which as a field is not sent
        around += [_Point(1, value), _Struct(1, [value])]

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            for sent in around:
                with pytest.raises(TypeError, match="allow_pickle=True"):
                    fd.all_gather_object(sent)
                with pytest.raises(TypeError, match="allow_pickle=True"):
                    fd.send_object(sent, 0)
        fd.barrier()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("key", _REFUSED_KEYS, ids=repr)
def test_keys_that_would_arrive_as_something_else_are_refused(key: Any) -> None:
    """As keys too, and dataclasses, which msgspec can encode as a key and not decode."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            with pytest.raises(TypeError, match="allow_pickle=True"):
                fd.all_gather_object([{1: 2, key: 3}])
        fd.barrier()

    run_ranks(on_rank, 2)


def test_objects_that_hold_themselves_are_refused() -> None:
    """Without end."""
    loop: list[Any] = []
    loop.append(loop)

    def on_rank(group: Backend) -> None:
        del group
        with pytest.raises(ValueError, match="nested too deeply"):
            fd.all_gather_object(loop)
        fd.barrier()

    run_ranks(on_rank, 2)


_TENSOR_CALLS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "broadcast_object": (lambda: fd.broadcast_object("text"), lambda: fd.broadcast(torch.tensor([5]))),
    "scatter_object": (lambda: fd.scatter_object(["a", "b"]), lambda: fd.broadcast(torch.tensor([5, 5]))),
    "all_gather_object": (lambda: fd.all_gather_object("text"), lambda: fd.all_gather(torch.tensor([5]))),
    "gather_object": (lambda: fd.gather_object("text"), lambda: fd.gather(torch.tensor([5]))),
}


@pytest.mark.parametrize("name", _TENSOR_CALLS)
def test_objects_are_not_taken_for_tensors(name: str) -> None:
    """A rank that calls a tensor collective gets an error that names both calls as the programs do."""
    of_objects, of_tensors = _TENSOR_CALLS[name]

    def on_rank(group: Backend) -> None:
        with pytest.raises(fd.CollectiveMismatchError, match=rf"called {name}\(\)") as caught:
            (of_objects if group.rank == 0 else of_tensors)()
        assert "int64" in caught.value.message or name == "gather_object"

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("name", ["broadcast_object", "scatter_object"])
def test_a_late_object_is_named(name: str) -> None:
    """When a rank is late the call has the name that the program knows."""

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            with pytest.raises(fd.DistributedTimeoutError, match=rf"^{name}\(\) on group 'world'"):
                {"broadcast_object": fd.broadcast_object, "scatter_object": fd.scatter_object}[name](
                    ["a", "b"], timeout=0.05
                )

    run_ranks(on_rank, 2)


def test_other_roots_of_scatter_object_are_found() -> None:
    """As for broadcast_object, with the name of the argument."""

    def on_rank(group: Backend) -> None:
        with pytest.raises(fd.CollectiveMismatchError, match=r"rank 1 called scatter_object\(src=1\)"):
            fd.scatter_object(["a", "b"], group.rank)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("world_size", [13, 14])
def test_sizes_that_do_not_fit_a_call(world_size: int) -> None:
    """scatter_object works for as many ranks as sizes fit a call, and for more."""

    def on_rank(group: Backend) -> str:
        values = ["x" * (1000 * rank) for rank in range(group.world_size)]
        return fd.scatter_object(values if group.rank == 3 else None, 3)

    assert [len(text) for text in run_ranks(on_rank, world_size)] == [1000 * rank for rank in range(world_size)]
