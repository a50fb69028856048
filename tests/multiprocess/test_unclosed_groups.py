"""A program that ends with a group open: it ends well, and the other ranks learn of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ferrodist.backends.native import is_native_available

_PROGRAM = """
import os, socket, sys, threading
import torch
import ferrodist as fd
from ferrodist.backends import native, tcp

kind = {"native": native.NativeBackend, "gloo": native.GlooBackend, "tcp": tcp.TcpBackend}[sys.argv[1]]
listener = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{listener.getsockname()[1]}"
rank = 1 if os.fork() == 0 else 0
group = kind(rank, 2, address, secret="a secret of this test", timeout=30, listener=listener if rank == 0 else None)
fd.barrier(group)

def wait_for_the_other_rank():
    try:
        fd.barrier(group)
    except fd.GroupClosedError:
        pass

if rank == 1:
    try:
        group.recv(bytearray(1), 0)
    except fd.PeerLostError:
        os._exit(0)
    os._exit(1)
thread = threading.Thread(target=wait_for_the_other_rank, daemon=True)
thread.start()
while sys._current_frames()[thread.ident].f_code.co_name == "wait_for_the_other_rank":
    pass
"""


@pytest.mark.parametrize("kind", ["native", "gloo", "tcp"])
def test_a_daemon_thread_in_a_collective_at_exit(kind: str) -> None:
    """A rank whose program ends while a daemon thread waits in a collective exits with 0 and says nothing."""
    if kind != "tcp" and not is_native_available():
        pytest.skip("this installation was built without the native engine")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kind], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
