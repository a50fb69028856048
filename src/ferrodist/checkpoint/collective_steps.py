"""Steps that succeed on all ranks or raise on all ranks, with the same message.

::

    all_or_none      each rank runs a block                             one all-gather
    call_on_all      the same for a function                            one all-gather
    run_on_rank0     rank 0 runs a function for all                     one broadcast
    Rank0Exchange    each rank makes a value, rank 0 answers to each    one gather and one scatter

`resolve_group_or_alone` returns the group of these ranks.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from ferrodist.backends.process_group import is_initialized, resolve_group
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.collectives.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from ferrodist.errors import DistCheckpointError, DistributedError, add_error_context, describe_error, to_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

    _Failure = list[Any]
    """An error as it is sent to other ranks: [message, ranks that it names]."""
    _Answer = tuple[bool, _Failure | None, bytes]
    """What rank 0 sends to a rank: whether ``answer`` was called, an error, and the result."""

_T = TypeVar("_T")


def resolve_group_or_alone(group: Backend | None) -> Backend:
    """Return the group, the default group, or a new group of this process alone."""
    if group is None and not is_initialized():
        return SimulatedBackend.create_group(1)[0]
    return resolve_group(group)


class Phase:
    """The current step of a function that all ranks run, for error messages; the function may begin the next one."""

    def __init__(self, action: str, path: str) -> None:
        self.action = action
        self.paths = [path]
        """The path, and the storage's name for it once that is known; both are compared between ranks."""

    def begin_next(self, action: str, path: str) -> None:
        """Name the next action, and the path as it calls it."""
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
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised below
        _raise_if_of_failed_group(error, group)
        own_error = error
    with _name_phase_in_errors(phase, group):
        answers = all_gather_object(
            (to_utf8(path), own_error and _make_failure(own_error, phase, group.rank)),
            group=group,
            timeout=deadline.remaining(),
        )
    if own_error is not None:
        raise _as_raised_here(own_error, phase, group.rank, about_arguments=about_arguments)
    if (failure := _first_failure([([path], failed) for path, failed in answers], action)) is not None:
        raise _make_error(failure)


def call_on_all(function: Callable[[], _T], action: str, path: str, group: Backend, deadline: Deadline) -> _T:
    """Return a function's result if it succeeded on all ranks; see `all_or_none`."""
    with all_or_none(action, path, group, deadline):
        return function()


def run_on_rank0(function: Callable[[], _T], action: str, path: str, group: Backend, deadline: Deadline) -> _T:
    """Run a function on rank 0, and return its result, or raise its error, on all ranks."""
    phase, own_error, result = Phase(action, path), None, None
    if group.rank == 0:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised below
            own_error = error
    with _name_phase_in_errors(phase, group):
        failure, result = broadcast_object(
            (own_error and _make_failure(own_error, phase, 0), result), group=group, timeout=deadline.remaining()
        )
    if own_error is not None:
        raise _as_raised_here(own_error, phase, 0)
    if failure is not None:
        raise _make_error(failure)
    return result  # type: ignore[no-any-return] # as rank 0 has it


class Rank0Exchange:
    """A round trip through rank 0: it gets a value of each rank, and returns an answer to each."""

    def __init__(self, group: Backend, deadline: Deadline) -> None:
        self._group = group
        self._deadline = deadline
        self.rank0_may_have_acted = False
        """False if this rank knows that rank 0 has not called ``answer``."""

    def run(
        self,
        phase: Phase,
        make: Callable[[], bytes],
        answer_action: str,
        answer: Callable[[list[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Call ``make`` on all ranks in a phase, ``answer`` on rank 0, and return this rank's answer.

        ``answer_action`` names the work of rank 0 in errors.
        """
        group, action = self._group, phase.action
        own_error: Exception | None = None
        made = b""
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - sent to rank 0, and raised below
            _raise_if_of_failed_group(error, group)
            own_error = error
        # Rank 0 answers only if all have sent a value, which none does whose group has failed.
        self.rank0_may_have_acted = own_error is None and group.failure is None
        with _name_phase_in_errors(phase, group):
            gathered = gather_object(
                (
                    [to_utf8(path) for path in phase.paths],
                    own_error and _make_failure(own_error, phase, group.rank),
                    made,
                ),
                group=group,
                timeout=self._deadline.remaining(),
            )
        answer_phase = Phase(answer_action, phase.paths[-1])
        answers: list[_Answer] | None = None
        answer_error: Exception | None = None
        if gathered is not None:
            answers, answer_error = _make_answers(gathered, action, answer_phase, answer)
        with _name_phase_in_errors(answer_phase, group):
            is_answered, failure, answered = scatter_object(answers, group=group, timeout=self._deadline.remaining())
        self.rank0_may_have_acted = is_answered
        if answer_error is not None:
            raise _as_raised_here(answer_error, answer_phase, 0)
        if own_error is not None:
            raise _as_raised_here(own_error, phase, group.rank)
        if failure is not None:
            raise _make_error(failure)
        return bytes(answered)


def _make_answers(
    gathered: Sequence[tuple[list[str], _Failure | None, bytes]],
    action: str,
    answer_phase: Phase,
    answer: Callable[[list[bytes]], Sequence[bytes]],
) -> tuple[list[_Answer], Exception | None]:
    """Return rank 0's answer to each rank, and the error of ``answer`` if it raised one."""
    failure = _first_failure([(paths, failed) for paths, failed, _ in gathered], action)
    if failure is not None:
        return [(False, failure, b"")] * len(gathered), None
    try:
        return [(True, None, result) for result in answer([value for *_, value in gathered])], None
    except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised by the caller
        return [(True, _make_failure(error, answer_phase, 0), b"")] * len(gathered), error


def _name_phase_in_errors(phase: Phase, group: Backend) -> contextlib.AbstractContextManager[None]:
    return add_error_context(lambda: f"Rank {group.rank} was to {phase}.", "Every rank must call it.")


def _raise_if_of_failed_group(error: Exception, group: Backend) -> None:
    """Raise an error of a failed group at once: the other ranks have one too, and can't be sent this one."""
    if is_of_group(error) and group.failure is not None:
        raise error


def is_of_group(error: BaseException) -> bool:
    """Return whether an error is one of communication, as when a rank is lost, and not of the checkpoint."""
    return isinstance(error, DistributedError) and not isinstance(error, DistCheckpointError)


def _make_failure(error: Exception, phase: Phase, rank: int) -> _Failure:
    if isinstance(error, DistCheckpointError):
        return [to_utf8(error.message), list(error.ranks)]
    return [to_utf8(f"rank {rank} could not {phase}: {describe_error(error)}"), [rank]]


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


def _make_error(failure: _Failure) -> DistCheckpointError:
    message, ranks = failure
    return DistCheckpointError(message, ranks=tuple(ranks))


def _as_raised_here(error: Exception, phase: Phase, rank: int, *, about_arguments: bool = True) -> Exception:
    if isinstance(error, DistCheckpointError) or (about_arguments and isinstance(error, (TypeError, ValueError))):
        return error
    raised = _make_error(_make_failure(error, phase, rank))
    raised.__cause__ = error
    return raised
