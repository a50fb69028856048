"""Fixtures of the rendezvous tests: a clean environment, and no thread left behind."""

import os
import socket
import threading
import time

import pytest

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_", "TORCHELASTIC_", "FERRODIST_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Hide the launcher's variables of the environment in which the tests run."""
    for name in list(os.environ):
        if name.startswith(_LAUNCHER):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_thread_left():
    """Fail a test that leaves one of ferrodist's threads behind."""
    yield
    limit = time.monotonic() + 5
    while left := [t.name for t in threading.enumerate() if t.name.startswith("ferrodist")]:
        assert time.monotonic() < limit, f"threads left behind: {left}"
        threading.Event().wait(0.01)


@pytest.fixture
def until():
    """Return a function that waits for a condition that another thread or process brings about."""

    def wait(condition, timeout=10.0):
        limit = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < limit, "the condition did not come true"
            threading.Event().wait(0.002)

    return wait


@pytest.fixture
def in_threads():
    """Return a function that runs calls in threads of their own; it gives each one's result or exception."""

    def run(*calls, limit=30.0):
        results = [None] * len(calls)

        def body(index):
            try:
                results[index] = calls[index]()
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=body, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit)
            assert not thread.is_alive(), "a call did not return"
        return results

    return run


@pytest.fixture
def free_port():
    """Return a function that returns a port free a moment ago, for servers that can't report another one."""

    def find():
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return probe.getsockname()[1]

    return find


@pytest.fixture
def silent_name_server(monkeypatch):
    """Return a host name whose look-up does not end before the test does."""
    release = threading.Event()
    genuine = socket.getaddrinfo

    def stuck(host, *args, **options):
        if host == "stuck.invalid" and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            release.wait(30)
        return genuine(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    yield "stuck.invalid"
    release.set()
