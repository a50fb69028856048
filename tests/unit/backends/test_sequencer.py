"""The order of operations by tickets, and waits by polling."""

from __future__ import annotations

import threading

from ferrodist.backends.polling import wait_until
from ferrodist.backends.sequencer import Sequencer
from ferrodist.deadline import Deadline


def test_turns_are_taken_in_order():
    """A thread waits for those with smaller tickets, and one runs at a time."""
    sequencer = Sequencer(lambda: False)
    tickets = [sequencer.reserve() for _ in range(4)]
    order = []

    def take(position):
        with sequencer.hold(position, 30) as has_turn:
            assert has_turn
            order.append(position)
            with sequencer.hold(position, 30) as again:
                assert again, "a turn that a thread has is its own"

    threads = [threading.Thread(target=take, args=(position,)) for position in (tickets[2], tickets[1], tickets[3])]
    for thread in threads:
        thread.start()
    take(tickets[0])
    for thread in threads:
        thread.join()
    assert order == tickets


def test_an_idle_sequencer_starts_at_once():
    """While a number is outstanding nobody starts at once, and whoever waits goes on when it is released."""
    sequencer = Sequencer(lambda: False)
    first = sequencer.start_if_idle()
    assert first is not None
    assert sequencer.start_if_idle() is None, "one is held"
    with sequencer.hold(first, 30) as again:
        assert again, "a turn that a thread has is its own"
    second = sequencer.reserve()
    order = []

    def take():
        with sequencer.hold(second, 30) as has_turn:
            assert has_turn
            order.append("second")

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(0.1)
    order.append("first")
    sequencer.end(first)
    thread.join(30)
    assert order == ["first", "second"]
    reserved = sequencer.reserve()
    assert sequencer.start_if_idle() is None, "one is reserved"
    with sequencer.releasing(reserved):
        pass
    assert sequencer.start_if_idle() == reserved + 1


def test_threads_take_turns_in_both_ways():
    """Each number is issued once, and one thread runs at a time."""
    sequencer = Sequencer(lambda: False)
    seen, running = [], []

    def take():
        for _ in range(300):
            sequence = sequencer.start_if_idle()
            if sequence is not None:
                running.append(sequence)
                assert len(running) == 1
                seen.append(running.pop())
                sequencer.end(sequence)
                continue
            sequence = sequencer.reserve()
            with sequencer.hold(sequence, 30) as has_turn:
                assert has_turn
                running.append(sequence)
                assert len(running) == 1
                seen.append(running.pop())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == list(range(1200))


def test_a_turn_may_not_come():
    """Waiting for a turn ends with the deadline, and with the group."""
    with Sequencer(lambda: False).hold(1, 0.01) as has_turn:
        assert not has_turn
    with Sequencer(lambda: True).hold(1, 1e9) as has_turn:
        assert not has_turn


def test_waiting_keeps_its_deadline():
    """A wait ends when its condition holds, when its time is over, or when the group has ended."""
    looks = iter(range(1000))
    assert wait_until(lambda: next(looks) == 500, Deadline(60))
    assert not wait_until(lambda: False, Deadline(0.01))
    assert not wait_until(lambda: False, Deadline(1e9), lambda: True)
