"""torch's stores as ours."""

from __future__ import annotations

import datetime as dt
import itertools
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from ferrodist.errors import DistributedTimeoutError, RendezvousError
from ferrodist.testing import STORE_CHECKS
from ferrodist.torch_backend.torch_store import TorchStore, make_private, server_of

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


@pytest.mark.parametrize(("mode", "left"), [(0o644, 0o600), (0o600, 0o600), (0o664, 0o664), (0o666, 0o666)])
def test_a_file_is_hidden_from_other_users(tmp_path, mode, left):
    """Who read it would know the job's secret; but not from those who are to use it."""
    (tmp_path / "shut").mkdir(0o700)
    path = tmp_path / "shut" / "store"
    path.touch()
    path.chmod(mode)
    store = dist.FileStore(str(path), 1)
    assert make_private(dist.PrefixStore("a", dist.PrefixStore("b", store))) == (mode in (0o644, 0o600))
    assert path.stat().st_mode & 0o777 == left


def test_a_file_that_others_may_have_opened():
    """In a folder that is open to others a secret would be read by whoever has opened the file before it was hidden."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # all of pytest's own folders are shut
        Path(folder).chmod(0o755)
        store = dist.FileStore(f"{folder}/store", 1)
        store.set("a", "1")
        assert not make_private(store)
        Path(folder).chmod(0o700)
        assert make_private(store)


def test_stores_without_a_file_or_a_server():
    """Have nothing to hide, and no way to other hosts."""
    store = dist.HashStore()
    assert make_private(store)
    assert server_of(store) is None
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert server_of(dist.PrefixStore("a", served)) == "127.0.0.1"
    assert not make_private(served)  # whoever reaches its port can read it


@pytest.mark.parametrize("stores", [hash_stores, file_stores, prefixed_stores])
def test_what_is_replaced_by_itself(stores, tmp_path):
    """Is found where it is, and not where it is missing, of which these stores say the same."""
    store = TorchStore(stores(tmp_path)[0], timeout=LIMIT)
    assert store.compare_set("key", b"1", b"1") == b""
    store.set("key", b"1")
    assert store.compare_set("key", b"1", b"1") == b"1"


def test_what_is_set_is_there_for_all(tmp_path):
    """When `set` returns, also in a store whose own does not wait for its server."""
    first, second = [TorchStore(store, timeout=LIMIT) for store in tcp_stores(tmp_path)]
    for number in range(1000):
        first.set("count", b"%d" % number)
        assert second.add("count", 1) == number + 1
