"""Values between ranks of a pipeline: messages, and large tensors out-of-band."""

import contextlib
import enum

import msgspec
import numpy as np
import pytest
import torch

from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.p2p import recv, send, start_checked_send
from ferrodist.collectives.serialization import PackedValue, encode_value
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    PipelineError,
    ProtocolError,
)
from ferrodist.parallel.pipeline import schedule_executor
from ferrodist.parallel.pipeline.schedule_executor import PendingRecv, send_value
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native"]
KIB = 256
"""Elements of float32."""

VALUES = {
    "nothing": (None, False),
    "small": (
        {
            "odd": torch.arange(3, dtype=torch.uint8),
            "none": torch.empty(0, 4),
            "one": torch.tensor(1.5).double(),
            7: ("x", b"y", 2**62, -1.5),
        },
        False,
    ),
    "just inside": ([torch.ones(120 * KIB), torch.ones(120 * KIB), torch.ones(0)], False),
    "one too many": ([torch.ones(100 * KIB), torch.ones(100 * KIB) * 2, torch.ones(100 * KIB) * 3], True),
    "large": ((torch.arange(300.0 * KIB).reshape(300, KIB).T, torch.ones(3), torch.ones(2, 200 * KIB)), True),
}
"""Each with whether some of its tensors travel out-of-band."""


def same(one, other):
    """Whether two values are equal, types and bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype is other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(same(*each) for each in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_arrive(backend):
    """Values arrive unchanged, whether their receives are prefetched or not; small tensors are aligned."""

    def program(group):
        for tag, (value, is_apart) in enumerate(VALUES.values()):
            if group.rank == 0:
                for request in send_value(PackedValue.of(value, "it"), 1, tag, group):
                    request.wait(10)
                continue
            pending = PendingRecv(0, tag, group, prefetch=bool(tag % 2))
            packed = pending.wait(Deadline(10))
            assert same(packed.open(), value)
            assert pending.has_out_of_band == is_apart
            assert all(tensor.data_ptr() % 64 == 0 for tensor in packed.tensors)

    run_ranks(program, 2, backend=backend)


def test_requires_grad_arrives():
    """The receiver knows which tensors require grad at the sender; a tensor that appears twice is sent once."""

    def program(group):
        one, other = torch.ones(2, requires_grad=True), torch.ones(300 * KIB)
        value = [one, other, {"again": one}, other.clone().requires_grad_()]
        if group.rank == 0:
            for request in send_value(PackedValue.of(value, "it"), 1, 0, group):
                request.wait(10)
            return
        packed = PendingRecv(0, 0, group, prefetch=True).wait(Deadline(10))
        assert packed.wants_gradient == [True, False, True]
        found = packed.open()
        assert found[0] is found[2]["again"]
        assert not any(tensor.requires_grad for tensor in packed.tensors)

    run_ranks(program, 2)


class _Number(enum.IntEnum):
    TWO = 2


class _Text(str):
    __slots__ = ()

    def __str__(self):
        return "other"


class _Bytes(bytes):
    __slots__ = ()


def test_subclasses_arrive_as_plain_values():
    """Also between stages of one rank, so that their ranks make no difference."""
    value = {
        _Text("key"): (np.float64(1.5), _Number.TWO, _Text("text"), _Bytes(b"12"), True, None),
        _Number.TWO: -(2**63),
    }

    def program(group):
        packed = PackedValue.of(value, "it")
        if group.rank == 0:
            send_value(packed, 1, 0, group)
        else:
            packed = PendingRecv(0, 0, group, prefetch=False).wait(Deadline(10))
        return packed.open()

    expected = {"key": (1.5, 2, "text", b"12", True, None), 2: -(2**63)}
    for found in run_ranks(program, 2):
        assert [*map(type, found)] == [str, int]
        assert same(found, expected)


@pytest.mark.parametrize("value", [{2**64: 1}, {"a": [-(2**63) - 1]}, {"a": np.datetime64(1, "s")}, {None: 1}])
def test_values_of_other_types(value):
    """They are refused by the sender."""
    with pytest.raises(TypeError, match="from rank to rank"):
        PackedValue.of(value, "it")


def make_message(header, rest=b""):
    """An encoded value with the given header."""
    size = len(header).to_bytes(8, "little")
    return torch.tensor(list((size + header).ljust(64, b"\0") + rest), dtype=torch.uint8)


WRONG_PLANS = [
    [],
    ["tensor"],
    ["tensor", 1],
    ["tensor", -1],
    ["tensor", "0"],
    ["what", 0],
    [0, 0],
    ["plain", [1]],
    ["list", 3],
    ["tuple", [["list", [["plain", {}]]]]],
    ["dict", [["key"]]],
    ["dict", [[None, ["plain", 1]]]],
    ["dict", {"key": ["plain", 1]}],
]


@pytest.mark.parametrize("prefetch", [False, True])
def test_malformed_messages(prefetch):
    """However malformed, they are an error that names the sender."""
    encode = msgspec.msgpack.encode
    wrong = [
        torch.zeros(3, dtype=torch.uint8),
        make_message(b"\xc1"),
        make_message(encode({"a": 1})),
        make_message(encode([["plain", 1], [[99, [1], False, 0]]])),
        make_message(encode([["tensor", 0], [[0, [1000], False, 0]]])),
        make_message(encode([["tensor", 0], [[0, [0, 2**63], False, 0]]])),
        torch.full((8,), 255, dtype=torch.uint8),
        *(make_message(encode([plan, [[0, [1], False, 0]]]), bytes(64)) for plan in WRONG_PLANS),
    ]

    def program(group):
        for tag, message in enumerate(wrong):
            if group.rank == 0:
                send(message, 1, tag=tag, group=group)
                continue
            with pytest.raises(
                ProtocolError, match=r"rank 0 of group .* sent a message that is not a pipeline value"
            ) as failure:
                PendingRecv(0, tag, group, prefetch=prefetch).wait(Deadline(10))
            assert failure.value.ranks == (0,)

    run_ranks(program, 2)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_missing_out_of_band_tensor(prefetch):
    """The wait for it has the same deadline as that for the message."""

    def program(group):
        if group.rank == 0:
            packed = PackedValue.of(torch.ones(300 * KIB), "it")
            message = torch.frombuffer(encode_value(packed, "it")[0], dtype=torch.uint8)
            for request in start_checked_send(message, 1, tag=0, group=group):
                request.wait(10)
            group.barrier()
            return
        with pytest.raises(DistributedTimeoutError):
            PendingRecv(0, 0, group, prefetch=prefetch).wait(Deadline(0.2))
        group.barrier()

    run_ranks(program, 2)


def test_cancelled_receives_take_nothing():
    """The next receive gets the value."""

    def program(group):
        if group.rank == 1:
            PendingRecv(0, 0, group, prefetch=True).cancel()
            PendingRecv(0, 0, group, prefetch=False).cancel()
        group.barrier()
        if group.rank == 0:
            send_value(PackedValue.of([torch.ones(2)], "it"), 1, 0, group)
        else:
            assert torch.equal(PendingRecv(0, 0, group, prefetch=True).wait(Deadline(10)).open()[0], torch.ones(2))

    run_ranks(program, 2)


def test_cancelled_out_of_band_receives_take_nothing():
    """Also when they were cancelled after the message had arrived."""

    def program(group):
        tensor = torch.ones(300 * KIB)
        if group.rank == 0:
            packed = PackedValue.of(tensor, "it")
            start_checked_send(
                torch.frombuffer(encode_value(packed, "it")[0], dtype=torch.uint8), 1, tag=0, group=group
            )
            group.barrier()
            group.barrier()
            send(tensor, 1, tag=0, group=group)
            return
        pending = PendingRecv(0, 0, group, prefetch=True)
        group.barrier()
        assert pending.has_out_of_band
        pending.cancel()
        group.barrier()
        assert torch.equal(recv(None, torch.float32, 0, tag=0, group=group, timeout=2), tensor)

    run_ranks(program, 2)


def test_a_group_that_fails_before_the_message():
    """The waiting rank gets the reason; the prefetched receive is not decoded."""

    def program(group):
        own = SubBackend(group, [0, 1])
        pending = PendingRecv(1 - own.rank, 0, own, prefetch=True)
        group.barrier()
        if group.rank == 0:
            own.abort("on purpose")
        with pytest.raises(DistributedError, match="on purpose"):
            pending.wait(Deadline(5))

    run_ranks(program, 2)


@pytest.mark.parametrize("ends", [False, True])
def test_a_message_that_arrives_during_cancel(monkeypatch, ends):
    """Its decoding starts no out-of-band receive; nor can it if the group was left as well."""
    readers = []

    class Held(schedule_executor.TensorReceive):
        def add_done_callback(self, callback):
            readers.append(callback)

    monkeypatch.setattr(schedule_executor, "TensorReceive", Held)

    def program(group):
        own = SubBackend(group, [0, 1])
        if group.rank == 0:
            packed = PackedValue.of(torch.ones(300 * KIB), "it")
            start_checked_send(torch.frombuffer(encode_value(packed, "it")[0], dtype=torch.uint8), 1, tag=0, group=own)
            group.barrier()
            return
        pending = PendingRecv(0, 0, own, prefetch=True)
        group.barrier()
        if ends:
            own.close()
        else:
            pending.cancel()
        (read,) = readers
        read()
        assert not pending.has_out_of_band
        if ends:
            with pytest.raises(GroupClosedError):
                pending.wait(Deadline(5))

    run_ranks(program, 2)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_group_that_fails_during_decoding(monkeypatch, prefetch):
    """The error is the group's failure, not a malformed message."""

    class Failing(schedule_executor.TensorReceive):
        def __init__(self, group, *args, shape, dtype):
            if shape is not None:  # of an out-of-band tensor
                group.abort(PipelineError("stage 3 has failed"))
            super().__init__(group, *args, shape=shape, dtype=dtype)

    monkeypatch.setattr(schedule_executor, "TensorReceive", Failing)

    def program(group):
        group = SubBackend(group, [0, 1])
        if group.rank == 0:
            with contextlib.suppress(PipelineError):
                send_value(PackedValue.of(torch.ones(300 * KIB), "it"), 1, 0, group)
        else:
            with pytest.raises(PipelineError, match="stage 3 has failed"):
                PendingRecv(0, 0, group, prefetch=prefetch).wait(Deadline(10))

    run_ranks(program, 2)
