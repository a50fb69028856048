"""The launcher's inbox for signals."""

from __future__ import annotations

import os
import select
import signal
import threading

from ferrodist.launch.signals import STOP_SIGNALS, USER_SIGNALS, SignalInbox, signal_name


def test_signals_arrive_in_order_and_handlers_come_back():
    """Signals become data while the inbox is open; afterwards everything is as before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS | USER_SIGNALS}
    previous = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with SignalInbox() as inbox:
            assert inbox.take() == []
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert select.select([inbox], [], [], 10)[0]
            assert inbox.take() == [signal.SIGUSR1, signal.SIGTERM]
            assert inbox.take() == []
        assert signal.getsignal(signal.SIGUSR1) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS | USER_SIGNALS} == before


def test_a_launch_may_name_its_stop_signals():
    """Signals that are neither named nor the user's keep their meaning."""
    before = signal.getsignal(signal.SIGTERM)
    with SignalInbox(frozenset({signal.SIGQUIT, signal.SIGUSR1})) as inbox:
        assert signal.getsignal(signal.SIGTERM) is before
        for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        assert select.select([inbox], [], [], 10)[0]
        assert inbox.take() == [signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def test_ignored_signals_stay_ignored():
    """Signals that nohup ignores stay ignored by the launcher."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.take() == []
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_outside_the_main_thread_the_inbox_is_empty():
    """Another thread may open an inbox; it changes no handler and gets nothing."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def open_inbox():
        with SignalInbox() as inbox:
            seen.append((signal.getsignal(signal.SIGTERM), inbox.take()))

    thread = threading.Thread(target=open_inbox)
    thread.start()
    thread.join()
    assert seen == [(before, [])]


def test_signals_have_names():
    """Known signals are named, others are numbered."""
    assert signal_name(15) == "SIGTERM"
    assert signal_name(60) == "signal 60"
