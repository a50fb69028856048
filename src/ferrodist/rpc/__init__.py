"""Remote procedure calls of registered functions, and references to remote objects.

::

    calls        RpcContext, RpcAgent -> Future, RpcStatistics; current_agent in called functions; RpcError
    references   RRef, ReferenceCounts
    transports   RpcBackend: GroupRpcBackend (any group), TcpRpcBackend (no group; processes may be started again),
                 SimulatedRpcBackend (threads)

The modules::

    agent.py             RpcAgent, RpcContext: what users call       future.py            Future, OneShot
    client.py            calls made: pending ones, timeouts          executor.py          worker threads, event loop
    server.py            calls served; all messages dispatched       shutdown.py          drain: no call under way
    messages.py          calls and results as bytes, frames          worker_names.py      ranks by name
    statistics.py        RpcStatistics, and its counters

    peer.py              connection to one rank, its flow control    receive_queue.py     the order of messages
    peer_manager.py      the ranks that can be called now            large_messages.py    what exceeds a frame
    transport.py         RpcBackend; transports over groups          tcp_transport.py     TcpRpcBackend
                                                                     tcp_directory.py     its addresses, in a store

    rref.py              RRef, and the objects behind it             refcount_tables.py   reference counts
    rref_manager.py      makes, uses, sends and serves RRefs         refcount_protocol.py calls that keep them right
"""

from typing import TYPE_CHECKING, Any

from ferrodist.errors import RpcError
from ferrodist.rpc.agent import DEFAULT_MESSAGE_LIMIT, RpcAgent, RpcContext, current_agent
from ferrodist.rpc.future import Future
from ferrodist.rpc.refcount_tables import ReferenceCounts
from ferrodist.rpc.rref import RRef
from ferrodist.rpc.statistics import RpcStatistics
from ferrodist.rpc.tcp_transport import TcpRpcBackend
from ferrodist.rpc.transport import GroupRpcBackend, RpcBackend, SimulatedRpcBackend
from ferrodist.torch_equivalents import missing_attribute

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


if not TYPE_CHECKING:  # checkers refuse names that are not there

    def __getattr__(name: str) -> Any:
        raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
