"""Rendezvous: the ranks of a job find and authenticate each other through a store.

::

    rendezvous.py     rendezvous(), enter_job()           environment.py  the launcher's variables
    shared_store.py   in a store that no rank serves      roll_call.py    claims; are all there?
    store.py          the interface; MemoryStore          file_store.py, tcp_store.py
    secret.py         the job secret, and the user's      auth.py         the handshake
    listener.py       accepts authenticated peers only    session.py      authenticated frames
    membership.py     a rank's request, membership        rounds.py       jobs that meet at one address
    sockets.py        deadlines, names, binding, fork     slurm.py        a task's place in a Slurm step
"""

from ferrodist.rendezvous.auth import PROTOCOL_VERSION, Hello, connect, greet
from ferrodist.rendezvous.environment import Environment, read_environment
from ferrodist.rendezvous.file_store import FileStore
from ferrodist.rendezvous.listener import Listener, parse_address
from ferrodist.rendezvous.membership import Membership
from ferrodist.rendezvous.rendezvous import enter_job, rendezvous, rendezvous_in
from ferrodist.rendezvous.secret import make_secret, resolve_secret
from ferrodist.rendezvous.store import MemoryStore, PrefixStore, Store
from ferrodist.rendezvous.tcp_store import TcpStore, TcpStoreServer

__all__ = [
    "PROTOCOL_VERSION",
    "Environment",
    "FileStore",
    "Hello",
    "Listener",
    "Membership",
    "MemoryStore",
    "PrefixStore",
    "Store",
    "TcpStore",
    "TcpStoreServer",
    "connect",
    "enter_job",
    "greet",
    "make_secret",
    "parse_address",
    "read_environment",
    "rendezvous",
    "rendezvous_in",
    "resolve_secret",
]


def __dir__() -> list[str]:
    return sorted(__all__)
