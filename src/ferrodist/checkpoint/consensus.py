"""Steps that succeed on all ranks or raise on all ranks, with the same message.

::

    all_or_none      each rank runs a block                             one all-gather
    call_on_all      the same for a function                            one all-gather
    run_on_rank0     rank 0 runs a function for all                     one broadcast
    Rank0Exchange    each rank makes a value, rank 0 answers to each    one gather and one scatter

`resolve_ranks` says which ranks these are.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from ferrodist.backends.process_group import is_initialized, resolve_group
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.collectives.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from ferrodist.errors import DistCheckpointError, DistributedError, add_error_context, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

    _Failure = list[Any]
    """An error as other ranks raise it: its message and the ranks that it names."""

_T = TypeVar("_T")


def resolve_ranks(group: Backend | None) -> Backend:
    """Return the group, the default group, or a new group of this process alone."""
    if group is None and not is_initialized():
        return SimulatedBackend.create_group(1)[0]
    return resolve_group(group)


class Phase:
    """The step that ranks take together, for messages; a function that it runs may go on to the next one."""

    def __init__(self, action: str, path: str) -> None:
        self.action = action
        self.paths = [path]
        """The path, and the storage's name for it once that is known; both are compared between ranks."""

    def go_on(self, action: str, path: str) -> None:
        """Begin another action, with the path by another name."""
        self.action = action
        self.paths.append(path)

    def __str__(self) -> str:
        return f"{self.action} at {self.paths[-1]}"


@contextlib.contextmanager
def all_or_none(
    action: str, path: str, group: Backend, deadline: Deadline, *, about_arguments: bool = True
) -> Iterator[None]:
    """Run the block on every rank; at its end raise on all ranks if it failed on any."""
    phase = Phase(action, path)
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised below
        own = _unless_group_failed(error, group)
    with _context(phase, group):
        answers = all_gather_object(
            (_plain(path), own and _failure(own, phase, group.rank)), group=group, timeout=deadline.remaining()
        )
    if own is not None:
        raise _as_raised_here(own, phase, group.rank, about_arguments=about_arguments)
    if (failure := _first_failure([([path], failed) for path, failed in answers], action)) is not None:
        raise _error(failure)


def call_on_all(function: Callable[[], _T], action: str, path: str, group: Backend, deadline: Deadline) -> _T:
    """Return a function's result if it succeeded on all ranks; see `all_or_none`."""
    with all_or_none(action, path, group, deadline):
        return function()


def run_on_rank0(function: Callable[[], _T], action: str, path: str, group: Backend, deadline: Deadline) -> _T:
    """Run a function on rank 0, and return its result, or raise its error, on all ranks."""
    phase, own, result = Phase(action, path), None, None
    if group.rank == 0:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised below
            own = error
    with _context(phase, group):
        failure, result = broadcast_object(
            (own and _failure(own, phase, 0), result), group=group, timeout=deadline.remaining()
        )
    if own is not None:
        raise _as_raised_here(own, phase, 0)
    if failure is not None:
        raise _error(failure)
    return result  # type: ignore[no-any-return] # as rank 0 has it


class Rank0Exchange:
    """A round trip through rank 0: it gets a value of each rank, and returns an answer to each."""

    def __init__(self, group: Backend, deadline: Deadline) -> None:
        self._group = group
        self._deadline = deadline
        self.may_be_answered = False
        """False if this rank knows that rank 0 has not called ``answer``."""

    def run(
        self,
        phase: Phase,
        make: Callable[[], bytes],
        answer_action: str,
        answer: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Call ``make`` on all ranks in a phase, ``answer`` on rank 0, and return this rank's answer."""
        group, action = self._group, phase.action
        own: Exception | None = None
        made = b""
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - sent to rank 0, and raised below
            own = _unless_group_failed(error, group)
        # Rank 0 answers only if all have sent a value, which none does whose group has failed.
        self.may_be_answered = own is None and group.failure is None
        with _context(phase, group):
            gathered = gather_object(
                ([_plain(path) for path in phase.paths], own and _failure(own, phase, group.rank), made),
                group=group,
                timeout=self._deadline.remaining(),
            )
        answer_phase = Phase(answer_action, phase.paths[-1])
        answers: list[tuple[bool, _Failure | None, bytes]] | None = None
        answer_error: Exception | None = None
        if gathered is not None:
            failure = _first_failure([(paths, failed) for paths, failed, _ in gathered], action)
            is_answered, results = failure is None, [b""] * group.world_size
            if failure is None:
                try:
                    results = list(answer([value for *_, value in gathered]))
                except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised below
                    answer_error, failure = error, _failure(error, answer_phase, 0)
            answers = [(is_answered, failure, result) for result in results]
        with _context(answer_phase, group):
            is_answered, failure, answered = scatter_object(answers, group=group, timeout=self._deadline.remaining())
        self.may_be_answered = is_answered
        if answer_error is not None:
            raise _as_raised_here(answer_error, answer_phase, 0)
        if own is not None:
            raise _as_raised_here(own, phase, group.rank)
        if failure is not None:
            raise _error(failure)
        return bytes(answered)


def _context(phase: Phase, group: Backend) -> contextlib.AbstractContextManager[None]:
    return add_error_context(lambda: f"Rank {group.rank} was to {phase}.", "Every rank must call it.")


def _unless_group_failed(error: Exception, group: Backend) -> Exception:
    """Return an error to be sent to other ranks, or raise one of the group, which they have too."""
    if is_of_group(error) and group.failure is not None:
        raise error
    return error


def is_of_group(error: BaseException) -> bool:
    """Return whether an error is one of communication, as when a rank is lost, and not of the checkpoint."""
    return isinstance(error, DistributedError) and not isinstance(error, DistCheckpointError)


def _failure(error: Exception, phase: Phase, rank: int) -> _Failure:
    if isinstance(error, DistCheckpointError):
        return [_plain(error.message), list(error.ranks)]
    return [_plain(f"rank {rank} could not {phase}: {describe_error(error)}"), [rank]]


def _first_failure(answers: Sequence[tuple[Sequence[str], _Failure | None]], action: str) -> _Failure | None:
    for _, failure in answers:
        if failure is not None:
            return failure
    for rank, (paths, _) in enumerate(answers):
        for first, path in zip(answers[0][0], paths, strict=True):
            if path != first:
                text = (
                    f"ranks were to {action} at one path, and rank 0 has {first}, rank {rank} {path}: choose it on one"
                    " rank, and broadcast it"
                )
                return [text, [0, rank]]
    return None


def _plain(text: str) -> str:
    """Escape half surrogate pairs, as which Python keeps bytes of a path that are not UTF-8: msgpack refuses them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _error(failure: _Failure) -> DistCheckpointError:
    return DistCheckpointError(failure[0], ranks=tuple(failure[1]))


def _as_raised_here(error: Exception, phase: Phase, rank: int, *, about_arguments: bool = True) -> Exception:
    if isinstance(error, DistCheckpointError) or (about_arguments and isinstance(error, (TypeError, ValueError))):
        return error
    raised = _error(_failure(error, phase, rank))
    raised.__cause__ = error
    return raised
