"""How ranks find and authenticate each other.

::

    join.py         rendezvous(), enter_job()        environment.py  what the launcher says
    meeting.py      in a store that nobody serves    membership.py   a rank's place in a job
    attendance.py   are all ranks there?             secret.py       the job secret
    store.py        the seam, and PrefixStore        memory_store.py, file_store.py, tcp_store.py
    listener.py     accepts proven peers only        handshake.py    the proof
    framing.py      bytes within a deadline          fork.py         no sockets in children
    resolution.py   names within a deadline          verdict.py      yes, or no and why
"""

from ferrodist.rendezvous.auth import PROTOCOL_VERSION, Hello, connect, greet
from ferrodist.rendezvous.environment import Environment, read_environment
from ferrodist.rendezvous.file_store import FileStore
from ferrodist.rendezvous.listener import Listener, parse_address
from ferrodist.rendezvous.rendezvous import enter_job, rendezvous, rendezvous_in
from ferrodist.rendezvous.roll_call import Membership
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
