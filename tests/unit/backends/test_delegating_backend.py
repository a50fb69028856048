"""Groups over a control group have the contract's methods, with its signatures and docstrings."""

import inspect

import pytest

import ferrodist as fd
from ferrodist.backends.base import Backend
from ferrodist.backends.delegating_backend import DelegatingBackend

METHODS = sorted(name for name, member in inspect.getmembers(Backend, inspect.isfunction) if name[0] != "_")


class OverControl(DelegatingBackend):
    """A group whose data plane adds nothing."""

    def close(self, timeout=None):
        self._control.close(timeout)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", [fd.NativeBackend, fd.GlooBackend, fd.NcclBackend, fd.HybridBackend, fd.UccBackend])
def test_methods_have_the_contracts_signature(kind, name):
    """Whoever asks a class of groups for help sees the arguments, as on `Backend`."""
    ours, contract = (inspect.signature(getattr(each, name)).parameters for each in (kind, Backend))
    assert list(ours) == list(contract)
    assert inspect.getdoc(getattr(kind, name))


def test_a_method_may_be_called_on_the_class():
    """It is the control group's, as on an instance."""
    first, second = map(OverControl, fd.SimulatedBackend.create_group(2))
    OverControl.send(first, b"one", 1)
    first.send(b"two", 1)
    received = bytearray(3)
    assert second.recv(received, 0) == OverControl.recv(second, bytearray(3), 0) == 0
    assert received == b"one"
    first.close()
    second.close()


class LonelyControl(Backend):
    """A control group that does not know of its sub-groups, and whose other ranks have died."""

    def send(self, data, dst, *, tag=0, timeout=None):
        raise fd.PeerLostError(f"rank {dst} died", ranks=(dst,))

    def recv(self, buffer, src, *, tag=0, timeout=None):
        raise fd.PeerLostError(f"rank {src} died", ranks=(src,))

    def abort(self, reason):
        pass

    def close(self, timeout=None):
        pass


def test_errors_of_sub_groups_have_their_ranks():
    """Also if the control group names its own: rank 2 of it is rank 1 of the sub-group."""
    subgroup = fd.SubBackend(OverControl(LonelyControl(1, 3)), [1, 2], name="pair")
    with pytest.raises(fd.PeerLostError, match="rank 1 of group 'pair': rank 2 died") as raised:
        subgroup.recv(bytearray(1), 1)
    assert raised.value.ranks == (1,)


def test_a_new_timeout_is_the_control_groups_too():
    """It carries the bytes, and waits as long."""
    group, other = map(OverControl, fd.SimulatedBackend.create_group(2, timeout=2.0))
    group.timeout = 0.05
    for call in (lambda: group.recv(bytearray(1), 1), group.barrier):
        with pytest.raises(fd.DistributedTimeoutError, match=r"0\.05 s"):
            call()
    with pytest.raises(ValueError, match="timeout must be"):
        group.timeout = -1
    group.close()
    other.close()
