"""Deadlines, with a clock that is passed in."""

import math

import pytest

from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.deadline import DEFAULT_COLLECTIVE_TIMEOUT, Deadline, check_timeout, default_timeout


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_counts_down_and_expires():
    """What is left and what has gone add up, and nothing is left after the end."""
    clock = Clock()
    deadline = Deadline(5, clock)
    clock.now += 2
    assert (deadline.remaining(), deadline.elapsed(), deadline.expired) == (3.0, 2.0, False)
    clock.now += 3
    assert (deadline.remaining(), deadline.expired) == (0.0, True)
    clock.now += 100
    assert deadline.remaining() == 0.0


def test_time_that_passed_before_counts():
    """A deadline of a call that has begun already ends when that call must."""
    clock = Clock()
    deadline = Deadline(5, clock, elapsed=2)
    assert (deadline.remaining(), deadline.elapsed(), deadline.expired) == (3.0, 2.0, False)
    clock.now += 3
    assert deadline.expired


def test_infinite_timeout_is_a_wait_that_locks_and_poll_accept():
    """An endless deadline never expires, and poll() can count its remaining time in milliseconds."""
    deadline = Deadline(math.inf, Clock())
    assert not deadline.expired
    assert deadline.remaining() * 1000 < 2**31


def test_a_timeout_too_large_for_a_float_is_endless():
    """Any number of seconds is one: those that no float can hold never pass."""
    assert check_timeout(10**400) == math.inf
    assert check_timeout(2**40) == 2.0**40


@pytest.mark.parametrize("wrong", [-1, -0.001, math.nan])
def test_refuses_what_is_no_duration(wrong):
    """Negative seconds and NaN are refused."""
    with pytest.raises(ValueError, match="seconds"):
        check_timeout(wrong)


@pytest.mark.parametrize("wrong", ["5", True, None, [1]])
def test_refuses_what_is_no_number(wrong):
    """Only numbers are seconds; True is not one."""
    with pytest.raises(TypeError, match="number of seconds"):
        check_timeout(wrong)


def test_the_default_is_long_enough_for_a_rank_that_prepares_data(monkeypatch):
    """Half an hour, as torch has it, unless the environment or an argument says otherwise."""
    monkeypatch.delenv("FERRODIST_TIMEOUT", raising=False)
    assert default_timeout() == DEFAULT_COLLECTIVE_TIMEOUT == 1800
    for text, seconds in (("90", 90), (" 2.5 ", 2.5), ("inf", math.inf), ("", 1800)):
        monkeypatch.setenv("FERRODIST_TIMEOUT", text)
        assert SimulatedBackend.create_group(1)[0].timeout == seconds
        assert SimulatedBackend.create_group(1, timeout=7)[0].timeout == 7


@pytest.mark.parametrize("text", ["soon", "5m", "0", "-1", "nan"])
def test_a_wrong_default_is_explained(monkeypatch, text):
    """A variable that says nothing is an error that names it, and not another timeout."""
    monkeypatch.setenv("FERRODIST_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"FERRODIST_TIMEOUT must be a number of seconds above 0.*'{text}'"):
        SimulatedBackend.create_group(1)
