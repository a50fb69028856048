"""Remote procedure calls of registered functions, and references to remote objects.

::

    calls        RpcContext, RpcAgent -> Future, RpcStatistics; current_agent in called functions; RpcError
    references   RRef, ReferenceCounts
    transports   RpcBackend: GroupRpcBackend (any group), TcpRpcBackend (no group; processes may be started again),
                 SimulatedRpcBackend (threads)

The modules::

    agent.py             RpcAgent, RpcContext: what users call       future.py            Future, OneShot
    client.py            calls made: pending, timeouts, statistics   executor.py          worker threads, event loop
    server.py            all received messages; calls served         shutdown.py          drain: no call under way
    messages.py          calls and results as bytes                  worker_names.py      ranks by name

    peer.py              connection to one rank, its flow control    framing.py           frames, and their order
    peer_manager.py      the ranks that can be called now            large_messages.py    what exceeds a frame
    transport.py         RpcBackend; transports over groups          tcp_transport.py     TcpRpcBackend
                                                                     tcp_directory.py     its addresses, in a store

    rref.py              RRef, and the objects behind it             refcount_tables.py   reference counts
    rref_manager.py      makes, uses, sends and serves RRefs         refcount_protocol.py calls that keep them right
"""

from ferrodist.errors import RpcError
from ferrodist.rpc.agent import DEFAULT_MESSAGE_LIMIT, RpcAgent, RpcContext, current_agent
from ferrodist.rpc.client import RpcStatistics
from ferrodist.rpc.future import Future
from ferrodist.rpc.refcount_tables import ReferenceCounts
from ferrodist.rpc.rref import RRef
from ferrodist.rpc.tcp_transport import TcpRpcBackend
from ferrodist.rpc.transport import GroupRpcBackend, RpcBackend, SimulatedRpcBackend

__all__ = [
    "DEFAULT_MESSAGE_LIMIT",
    "Future",
    "GroupRpcBackend",
    "RRef",
    "ReferenceCounts",
    "RpcAgent",
    "RpcBackend",
    "RpcContext",
    "RpcError",
    "RpcStatistics",
    "SimulatedRpcBackend",
    "TcpRpcBackend",
    "current_agent",
]


def __dir__() -> list[str]:
    return sorted(__all__)
