"""Deaths that MPI's collectives know of before its detector says whose they are."""

from types import SimpleNamespace

import pytest

from ferrodist.backends.mpi import backend as module
from ferrodist.backends.mpi.backend import MpiBackend


class MpiError(Exception):
    def Get_error_class(self):
        return 75


class LateBackend(MpiBackend):
    """A backend whose detector names the dead rank at its third call, or never."""

    def __init__(self, named_at):
        self._mpi = SimpleNamespace(ERR_PROC_FAILED=75, ERR_PROC_FAILED_PENDING=76, ERR_REVOKED=77, Exception=MpiError)
        self._detects_deaths, self._gone = True, set()
        self.named_at, self.num_checks, self.aborted = named_at, 0, []

    @property
    def failure(self):
        return None

    def abort(self, error):
        self.aborted.append(error)

    def _check_deaths(self):
        self.num_checks += 1
        if self.num_checks == self.named_at:
            self._gone.add(1)


@pytest.mark.parametrize("named_at", [1, 3])
def test_a_death_that_is_named_late(named_at):
    """The group is not aborted for MPI's error, which names no rank: the detector does, a little later."""
    backend = LateBackend(named_at)
    backend._abort_for(MpiError())
    assert (backend.num_checks, backend.aborted) == (named_at, [])


def test_a_death_that_is_never_named(monkeypatch):
    """After a while the group is aborted for MPI's error."""
    monkeypatch.setattr(module, "_DETECTION_SECONDS", 0.05)
    monkeypatch.setattr(module.runtime, "translate", lambda _, error: error)  # which asks a library for its version
    backend = LateBackend(0)
    backend._abort_for(MpiError())
    assert [type(error) for error in backend.aborted] == [MpiError]
