"""The systems that `rpc.py` compares: four implementations of remote calls, behind one interface.

Each is set up as usual on one host, with no settings beyond that:

- ferrodist: an `RpcAgent` of a group with the native engine.
- torch rpc: TensorPipe with its default options. Functions are pickled, tensors are sent out of band.
- gRPC: bytes over loopback without encryption, messages of any size, one channel, 8 serving threads. A tensor is a
  header and its memory, copied once to send it and used where it was received. Numbers are 8 bytes. A message is sent
  whole; streaming was not tried.
- Ray: an actor on a host of 2 CPUs without its dashboard. Tensors are sent as NumPy arrays, which it reads in shared
  memory without a copy; as tensors they would be pickled, which took about four times as long from 16 MiB on.

Results of gRPC and Ray are read-only; those of the others are writable.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import logging
import os
import struct
import time
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed import rpc as torch_rpc

import ferrodist as fd
from ferrodist.rpc.agent import RpcAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

__all__ = ["SYSTEMS", "WARM_UP_SECONDS", "System", "checked", "rate_of"]

WARM_UP_SECONDS = 0.1
_HEADER_BYTES = 64
_NUM_SERVING = 8
_OBJECT_STORE_BYTES = 2 << 30


def checked(got: object, expected: object) -> None:
    """Raise unless a call returned its argument."""
    if got != expected:
        raise RuntimeError(f"an echo of {expected} came back as {got}")


def rate_of(call: Callable[[int], Any], seconds: float) -> float:
    """Calls a second, made one after another."""
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        checked(call(count), count)
        count += 1
    return count / taken


def echo(value: Any) -> Any:
    """The function that all systems call."""
    return value


class System(ABC):
    """One of two processes that call each other: it serves from when it is made until it is closed.

    Args:
        group: The two; nothing but their start goes through it, with all but ferrodist.
        folder: An empty one that both see.
    """

    package: ClassVar[str]
    distribution: ClassVar[str]

    @abstractmethod
    def __init__(self, group: fd.Backend, folder: str) -> None: ...

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be measured here; None where it can."""
        if importlib.util.find_spec(cls.package) is None:
            return f"there is no package {cls.package} here: pip install {cls.distribution}"
        return None

    @abstractmethod
    def call(self, number: int) -> Any:
        """Call `echo` of the other process, and wait."""

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same with a tensor."""
        result: torch.Tensor = self.call(tensor)  # type: ignore[arg-type] # those that take both alike
        return result

    @abstractmethod
    def start(self, number: int) -> Any:
        """Call, and don't wait."""

    def collect(self, started: Sequence[Any]) -> list[Any]:
        """Wait for calls that were started: their results."""
        return [each.result() for each in started]

    @abstractmethod
    def start_there(self, seconds: float) -> Callable[[], float]:
        """Have the other process call this one for so long; what is returned waits, and gives its `rate_of`."""

    def rate_both_ways(self, seconds: float) -> float:
        """Calls a second of both together, each calling the other from one thread."""
        self.start_there(WARM_UP_SECONDS)()  # this way has not been used yet
        there = self.start_there(seconds)
        return rate_of(self.call, seconds) + there()

    @abstractmethod
    def close(self, *, has_failed: bool) -> None:
        """Stop; the other one makes no calls any more, and stops too unless one of the two has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(has_failed=kind is not None)


class Ferrodist(System):
    """See above."""

    package, distribution = "ferrodist", "ferrodist"

    def __init__(self, group: fd.Backend, folder: str) -> None:
        del folder
        self._agent = RpcAgent(group)
        self._other = 1 - group.rank
        self._agent.register("echo", echo)
        self._agent.register("drive", lambda seconds: rate_of(self.call, seconds))

    def call(self, number: int) -> Any:
        return self._agent.rpc_sync(self._other, "echo", number)

    def start(self, number: int) -> Any:
        return self._agent.rpc_async(self._other, "echo", number)

    def start_there(self, seconds: float) -> Callable[[], float]:
        return self._agent.rpc_async(self._other, "drive", seconds).result

    def close(self, *, has_failed: bool) -> None:
        del has_failed
        self._agent.close()


def _drive_torch(seconds: float) -> float:
    other = f"rank{1 - torch_rpc.get_worker_info().id}"
    return rate_of(lambda number: torch_rpc.rpc_sync(other, echo, args=(number,)), seconds)


class TorchRpc(System):
    """See above."""

    package, distribution = "torch", "torch"

    def __init__(self, group: fd.Backend, folder: str) -> None:
        # Of torch's own, when it stops.
        warnings.filterwarnings("ignore", message="You are using a Backend .* as a ProcessGroup")
        self._other = f"rank{1 - group.rank}"
        options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting")
        torch_rpc.init_rpc(f"rank{group.rank}", rank=group.rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]

    @classmethod
    def missing(cls) -> str | None:
        return None if torch_rpc.is_available() else "torch was built without torch.distributed.rpc"

    def call(self, number: int) -> Any:
        return torch_rpc.rpc_sync(self._other, echo, args=(number,))

    def start(self, number: int) -> Any:
        return torch_rpc.rpc_async(self._other, echo, args=(number,))

    def collect(self, started: Sequence[Any]) -> list[Any]:
        return list(torch.futures.wait_all(list(started)))

    def start_there(self, seconds: float) -> Callable[[], float]:
        wait: Callable[[], float] = torch_rpc.rpc_async(self._other, _drive_torch, args=(seconds,)).wait
        return wait

    def close(self, *, has_failed: bool) -> None:
        torch_rpc.shutdown(graceful=not has_failed)  # it waits for the other one then, for as long as that takes


def _ignore_read_only() -> None:
    """A received tensor, used without a copy and read-only."""
    warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")


def _pack(tensor: torch.Tensor) -> bytes:
    header = ",".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]).encode()
    return b"".join((header.ljust(_HEADER_BYTES), tensor.numpy().data.cast("B")))


def _unpack(data: bytes) -> torch.Tensor:
    dtype, *shape = data[:_HEADER_BYTES].decode().split(",")
    flat = torch.frombuffer(data, dtype=getattr(torch, dtype), offset=_HEADER_BYTES)
    return flat.view([int(size) for size in shape])


class Grpc(System):
    """See above."""

    package, distribution = "grpc", "grpcio"

    def __init__(self, group: fd.Backend, folder: str) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells that the other one has closed, too
        import grpc  # noqa: PLC0415 - may be missing

        del folder
        _ignore_read_only()
        number, real = struct.Struct("<q"), struct.Struct("<d")
        kinds: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
            "Number": (echo, number.pack, lambda data: number.unpack(data)[0]),
            "Tensor": (echo, _pack, _unpack),
            "Drive": (lambda seconds: rate_of(self.call, seconds), real.pack, lambda data: real.unpack(data)[0]),
        }
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.enable_http_proxy", 0),  # of the environment, which would be asked for loopback too
        ]
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                lambda request, _, function=function: function(request),
                request_deserializer=unpack,
                response_serializer=pack,
            )
            for name, (function, pack, unpack) in kinds.items()
        }
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(_NUM_SERVING), options=options)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Calls", handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        other_port = fd.all_gather_object(port, group=group)[1 - group.rank]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{other_port}", options=options)
        self._stubs = {
            name: self._channel.unary_unary(f"/Calls/{name}", request_serializer=pack, response_deserializer=unpack)
            for name, (_, pack, unpack) in kinds.items()
        }
        self._number, self._tensor = self._stubs["Number"], self._stubs["Tensor"]

    def call(self, number: int) -> Any:
        return self._number(number)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._tensor(tensor)
        return result

    def start(self, number: int) -> Any:
        return self._number.future(number)

    def start_there(self, seconds: float) -> Callable[[], float]:
        result: Callable[[], float] = self._stubs["Drive"].future(seconds).result
        return result

    def close(self, *, has_failed: bool) -> None:
        del has_failed
        self._channel.close()
        self._server.stop(None).wait()


class _Actor:
    """The actor that serves Ray's calls."""

    def echo(self, value: Any) -> Any:
        return value

    def drive(self, other: Any, seconds: float) -> float:
        import ray  # noqa: PLC0415 - may be missing

        return rate_of(lambda number: ray.get(other.echo.remote(number)), seconds)


class Ray(System):
    """See above. The second process is Ray's own; that of the group does nothing."""

    package, distribution = "ray", "ray"

    def __init__(self, group: fd.Backend, folder: str) -> None:
        self._ray: Any = None
        if group.rank:
            return
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray  # noqa: PLC0415 - may be missing

        _ignore_read_only()
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        self._ray = ray
        self._kind: Any = ray.remote(_Actor)
        self._actor: Any = self._kind.remote()

    def call(self, number: int) -> Any:
        return self._ray.get(self._actor.echo.remote(number))

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._ray.get(self._actor.echo.remote(tensor.numpy())))

    def start(self, number: int) -> Any:
        return self._actor.echo.remote(number)

    def collect(self, started: Sequence[Any]) -> list[Any]:
        return list(self._ray.get(list(started)))

    def start_there(self, seconds: float) -> Callable[[], float]:
        raise NotImplementedError("nobody can call the process that has started Ray")

    def rate_both_ways(self, seconds: float) -> float:
        """Calls of two actors, with a thread to call and one to serve each."""
        pair = [self._kind.options(max_concurrency=2).remote() for _ in range(2)]
        rate = 0.0
        for each in (WARM_UP_SECONDS, seconds):
            there = [actor.drive.remote(other, each) for actor, other in zip(pair, reversed(pair), strict=True)]
            rate = sum(self._ray.get(there))
        for actor in pair:
            self._ray.kill(actor)
        return rate

    def close(self, *, has_failed: bool) -> None:
        del has_failed
        if self._ray is not None:
            self._ray.shutdown()


SYSTEMS: dict[str, type[System]] = {"ferrodist": Ferrodist, "torch rpc": TorchRpc, "gRPC": Grpc, "Ray": Ray}
"""By the names that are printed; the first one is ours."""
