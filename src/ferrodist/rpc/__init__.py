"""Remote procedure calls of registered functions, and references to remote objects.

::

    calls        RpcContext, RpcAgent -> Future, RpcStatistics; current_agent in called functions; RpcError
    references   RRef, ReferenceCounts
    transports   RpcBackend: GroupRpcBackend (any group), TcpRpcBackend (no group; processes may be started again),
                 SimulatedRpcBackend (threads)
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
