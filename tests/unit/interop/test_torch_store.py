"""torch's stores as ours."""

from __future__ import annotations

import datetime as dt
import itertools

import pytest
import torch.distributed as dist

from ferrodist.errors import DistributedTimeoutError, RendezvousError
from ferrodist.interop.torch_store import TorchStore
from ferrodist.testing import STORE_CHECKS

LIMIT = 20.0
_names = itertools.count()


def hash_stores(folder):
    """One store of this process."""
    del folder
    return [dist.HashStore()] * 2


def file_stores(folder):
    """Two clients of one file."""
    path = str(folder / f"store-{next(_names)}")
    return [dist.FileStore(path, 2) for _ in range(2)]


def tcp_stores(folder):
    """A server, and a client."""
    del folder
    limit = dt.timedelta(seconds=LIMIT)
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
    return [server, dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, timeout=limit, wait_for_workers=False)]


def prefixed_stores(folder):
    """A part of a store."""
    return [dist.PrefixStore("part", dist.PrefixStore("of", store)) for store in tcp_stores(folder)]


@pytest.mark.parametrize("stores", [hash_stores, file_stores, prefixed_stores])
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_a_store_of_torch_is_one_of_ours(check, stores, tmp_path):
    """All promises of stores hold."""
    check(lambda: [TorchStore(store, timeout=LIMIT) for store in stores(tmp_path)])


def test_a_store_whose_server_is_gone():
    """Calls raise, and say that."""
    server, client = tcp_stores(None)
    store = TorchStore(client, timeout=LIMIT)
    store.set("a", b"1")
    with pytest.raises(DistributedTimeoutError, match="missing key: 'b'"):
        store.get("b", timeout=0)
    del server
    with pytest.raises(RendezvousError, match="torch's store does not answer"):
        store.get("b", timeout=5)
