"""Facts that come with a call, from a rank whose program is another one: an error that names it, on all ranks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.native import is_native_available
from ferrodist.collectives.engines.host import share_bytes
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

_NATIVE = pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")

_CALLS: dict[str, Callable[[], object]] = {
    "all_gather_uneven": lambda: fd.all_gather_uneven(torch.ones(2)),
    "all_gather_object": lambda: fd.all_gather_object("x"),
    "gather_object": lambda: fd.gather_object("x", 0),
    "gather": lambda: fd.gather(torch.ones(2), 0),
    "broadcast_object": lambda: fd.broadcast_object("x", 1),
    "scatter_object": lambda: fd.scatter_object(None, 1),
    "scatter": lambda: fd.scatter(None, 1),
}

_SAID = {
    "nothing": b"",
    "a byte": b"\xff",
    "a root alone": struct.pack("<i", 1),
    "a huge size": struct.pack("<iq", 1, 1 << 62),
    "a size below 0": struct.pack("<iq", 1, -5),
    "a size that misses its object": struct.pack("<iq", 1, 7) + b"m",
    "a scatter of an unknown dtype": struct.pack("<iiBBBq", 0, 1, 200, 0, 1, 6),
    "a scatter of an unknown dim": struct.pack("<iiBBBq", 7, 1, 0, 0, 1, 6),
    "a scatter of too many dims": struct.pack("<iiBBBq", 0, 1, 0, 0, 200, 6),
    "a scatter of a size below 0": struct.pack("<iiBBBq", 0, 1, 0, 0, 1, -6),
    "a scatter without its shape": struct.pack("<iiBBBq", 0, 1, 0, 0, 2, 6),
    "a scatter that misses elements": struct.pack("<iiBBBqf", 0, 1, 0, 0, 1, 6, 1.0),
    "a scatter of sizes with a huge product": struct.pack("<iiBBB3qf", 0, 1, 1, 0, 3, *[1 << 40] * 3, 1.0),
    "a huge size along the dim": struct.pack("<qqhhiBB", 1 << 62, 1, 0, 1, -1, 1, 0),
    "a size along the dim below 0": struct.pack("<qqhhiBB", -1, 1, 0, 1, -1, 1, 0),
    "rows of a size below 0": struct.pack("<qqhhiBB", 1, -1, 0, 1, -1, 1, 0),
    "parts of an unknown dtype": struct.pack("<qqhhiBB", 1, 1, 0, 1, -1, 200, 0),
    "a part that misses elements": struct.pack("<qqhhiBBf", 2, 1, 0, 1, -1, 1, 0, 1.0),
    "an empty part with elements": struct.pack("<qqhhiBBf", 0, 1, 0, 1, -1, 1, 0, 1.0),
    "parts of a huge product": struct.pack("<qqhhiBBf", 1 << 40, 1 << 40, 0, 1, -1, 1, 0, 1.0),
}


@pytest.mark.parametrize("backend", ["simulated", pytest.param("native-threads", marks=_NATIVE)])
@pytest.mark.parametrize("operation", _CALLS)
def test_malformed_payloads_end_the_group(operation: str, backend: str) -> None:
    """A payload that is too short, or describes an impossible tensor, ends the group and names its rank."""
    for said in _SAID.values():

        def program(group: fd.Backend, said: bytes = said) -> None:
            if group.rank == 1:
                share_bytes(group, operation, said, 20)
            with pytest.raises((fd.ProtocolError, fd.CollectiveMismatchError)) as caught:
                group.recv(bytearray(1), 0, timeout=20) if group.rank == 1 else _CALLS[operation]()
            assert isinstance(caught.value, fd.CollectiveMismatchError) or caught.value.ranks == (1,)

        run_ranks(program, 3, backend=backend, timeout=60)
