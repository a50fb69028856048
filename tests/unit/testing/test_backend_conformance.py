"""The conformance suite of backends passes on correct backends, and finds the faults of broken ones."""

import time

import pytest
from toy_backend import Message, ToyBackend

from ferrodist.errors import DistributedTimeoutError, GroupAbortedError, RankFailedError, SizeMismatchError
from ferrodist.testing import BACKEND_CHECKS, check_backend, run_ranks
from ferrodist.testing.conformance.backend import suite
from ferrodist.testing.conformance.harness import check_bytes, pattern

CHECKS = {check.__name__: check for check in BACKEND_CHECKS}


class Runner:
    """Ranks of one of `run_ranks`'s own backends, as the suite takes them from authors of backends."""

    def __init__(self, backend):
        self.backend = backend

    def run(self, world_size, fn):
        return run_ranks(fn, world_size, backend=self.backend)


GOOD = {
    "toy": ToyBackend.create_group,
    "simulated": Runner("simulated"),
    "tcp-threads": Runner("tcp-threads"),
    "native-threads": Runner("native-threads"),
    "native": Runner("native"),
    "gloo-threads": Runner("gloo-threads"),
}


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", GOOD.values(), ids=GOOD.keys())
def test_backend_keeps_the_contract(backend, check):
    """Every rule holds on every backend, the four methods of the toy included."""
    check(backend, 3)


class UnorderedBackend(ToyBackend):
    """Receives the newest message first."""

    def recv(self, buffer, src, *, tag=0, timeout=None):
        with self.hub.changed:
            self.hub.messages.reverse()
            self.hub.changed.notify_all()
        return super().recv(buffer, src, tag=tag, timeout=timeout)


class ShortTagBackend(ToyBackend):
    """Compares 64 bits of the tag."""

    def matches(self, message, src, tag):
        return super().matches(message, src, message.tag) and (message.tag - tag) % 2**64 == 0


class TaglessBackend(ToyBackend):
    """Receives from any source."""

    def matches(self, message, src, tag):
        return super().matches(message, src, message.tag)


class SwallowingBackend(ToyBackend):
    """Drops a message that does not fit."""

    def take(self, message, view):
        try:
            return super().take(message, view)
        except SizeMismatchError:
            self.hub.messages.remove(message)
            raise


class BorrowingBackend(ToyBackend):
    """Keeps the sender's buffer in place of its bytes."""

    def send(self, data, dst, *, tag=0, timeout=None):
        super().send(data, dst, tag=tag, timeout=timeout)
        with self.hub.changed:
            self.hub.messages[-1].data = self.flat(data)


class PatientBackend(ToyBackend):
    """Exceeds its timeout."""

    def check_call(self, tag, timeout):
        deadline = super().check_call(tag, timeout)
        deadline._end += 1.0
        return deadline


class HastyBackend(ToyBackend):
    """Times out early."""

    def check_call(self, tag, timeout):
        deadline = super().check_call(tag, timeout)
        deadline._end -= deadline.timeout / 2
        return deadline


class OpenDoorBackend(ToyBackend):
    """Has a barrier that does not wait."""

    def barrier(self, timeout=None):
        pass


class AnonymousBackend(ToyBackend):
    """Does not name the rank that aborted."""

    def abort(self, reason):
        super().abort(GroupAbortedError(str(reason)))


class FickleBackend(ToyBackend):
    """Lets the last abort count."""

    def abort(self, reason):
        self.hub.failure = None
        super().abort(reason)


class ForgetfulBackend(ToyBackend):
    """Drops its sent messages when it closes."""

    def close(self, timeout=None):
        with self.hub.changed:
            self.hub.messages = [message for message in self.hub.messages if message.src != self.rank]
        super().close(timeout)


class NosyBackend(ToyBackend):
    """Returns the requested source as the sender."""

    def recv(self, buffer, src, *, tag=0, timeout=None):
        super().recv(buffer, src, tag=tag, timeout=timeout)
        return src


class TrustingBackend(ToyBackend):
    """Ignores tags."""

    def check_call(self, tag, timeout):
        return super().check_call(0, timeout)


class ResendingBackend(ToyBackend):
    """Delivers large messages though their send ran out of time."""

    def send(self, data, dst, *, tag=0, timeout=None):
        super().send(data, dst, tag=tag, timeout=timeout)
        if timeout is not None and timeout < 1:
            raise DistributedTimeoutError("too slow", ranks=(dst,))


class UnclosableBackend(ToyBackend):
    """Can be closed once."""

    def close(self, timeout=None):
        self.check_usable()
        super().close(timeout)


class TruncatingBackend(ToyBackend):
    """Loses the last byte of messages longer than 64 KiB."""

    def take(self, message, view):
        if len(view) > 65_536:
            message = self.hub.messages[self.hub.messages.index(message)]
            message.data = message.data[:-1] + b"\0"
        return super().take(message, view)


BROKEN = [
    (UnorderedBackend, "order_is_kept_within_a_tag"),
    (ShortTagBackend, "tags_are_compared_whole"),
    (TaglessBackend, "tags_do_not_wait_for_each_other"),
    (SwallowingBackend, "a_message_that_does_not_fit_stays"),
    (BorrowingBackend, "a_sent_buffer_may_be_changed"),
    (PatientBackend, "a_receive_keeps_its_deadline"),
    (HastyBackend, "a_receive_keeps_its_deadline"),
    (OpenDoorBackend, "nobody_leaves_a_barrier_early"),
    (AnonymousBackend, "an_abort_wakes_every_rank"),
    (FickleBackend, "a_failed_group_stays_failed"),
    (ForgetfulBackend, "what_was_sent_before_close_arrives"),
    (NosyBackend, "any_source_takes_from_whoever_sent"),
    (TrustingBackend, "wrong_tags_are_refused"),
    (ResendingBackend, "a_send_in_vain_is_not_received"),
    (UnclosableBackend, "a_closed_group_says_so"),
    (TruncatingBackend, "messages_of_all_sizes_arrive_whole"),
]


@pytest.mark.parametrize(("backend", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_broken_backend_is_found(backend, rule, monkeypatch):
    """A backend that breaks one rule fails the check of that rule, soon and with an assertion."""
    monkeypatch.setattr("ferrodist.testing.conformance.backend.messages.TIMEOUT", 1.0)
    start = time.monotonic()
    with pytest.raises((AssertionError, RankFailedError)):
        CHECKS[rule](backend.create_group, 3)
    assert time.monotonic() - start < 10


def test_check_backend_runs_all_checks(monkeypatch):
    """`check_backend` runs every check at every world size, and needs nothing more of a backend."""
    calls = []
    monkeypatch.setattr(suite, "BACKEND_CHECKS", [_named("one", lambda *args: calls.append(args))] * 2)
    check_backend(ToyBackend.create_group, world_sizes=[2, 5])
    assert calls == [(ToyBackend.create_group, size) for size in (2, 2, 5, 5)]


def test_check_backend_lists_all_broken_rules(monkeypatch):
    """All failures are in one error, each with its rule, and the first one is the cause."""

    def broken(backend, world_size):
        """The rule in one line."""
        raise AssertionError(f"broken at {world_size}")

    checks = [_named("good", lambda *args: None), broken]
    monkeypatch.setattr(suite, "BACKEND_CHECKS", checks)
    with pytest.raises(AssertionError) as caught:
        check_backend(ToyBackend.create_group, world_sizes=[2, 3])
    message = str(caught.value)
    assert message.startswith("backend: 2 of 4 checks failed\n")
    assert "broken (world size 2): The rule in one line.\n    AssertionError: broken at 2" in message
    assert str(caught.value.__cause__) == "broken at 2"


def test_checks_have_names_and_rules():
    """Names tell checks apart, and each docstring states the rule."""
    assert len(CHECKS) == len(BACKEND_CHECKS)
    assert all(check.__doc__ for check in BACKEND_CHECKS)


def test_checks_take_as_many_ranks_as_they_need():
    """A check that needs three ranks takes three when it is given two."""
    sizes = []

    def factory(world_size):
        sizes.append(world_size)
        return ToyBackend.create_group(world_size)

    CHECKS["the_order_of_ranks_is_kept"](factory, 2)
    assert sizes == [3]


def test_differences_are_reported_in_one_line():
    """A difference between large messages is shown by its position."""
    good = pattern(1 << 20)
    bad = good[:1000] + bytes([good[1000] ^ 1]) + good[1001:]
    check_bytes(good, good, "what")
    with pytest.raises(AssertionError, match="what: byte 1000 of 1048576 is") as caught:
        check_bytes(bad, good, "what")
    assert len(str(caught.value)) < 200
    with pytest.raises(AssertionError, match="what: 3 bytes in place of 1048576"):
        check_bytes(b"abc", good, "what")


def test_toy_messages_are_compared_by_value():
    """The toy itself: two equal messages are equal, as its queue's ``remove`` and ``index`` need."""
    assert Message(0, 1, 2, b"x") == Message(0, 1, 2, b"x")


def _named(name, function):
    function.__name__ = name
    return function
