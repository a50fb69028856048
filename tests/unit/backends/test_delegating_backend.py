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
