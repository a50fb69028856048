"""Explores orders of messages, deaths, starts and broken connections: reference counts are right in each of them.

Three ranks without threads: their connections, and the choice of the next event, are here; all else is the agents' own.
"""

import contextlib
import gc
import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, PeerLostError, RpcError
from ferrodist.rpc import rref_manager
from ferrodist.rpc.future import Future
from ferrodist.rpc.messages import MET, Call, Failure, FailureKind, pack_call, unpack_call
from ferrodist.rpc.refcount_protocol import CONFIRM, LOST, REGISTER, RELEASE, SETTLE, UNREGISTER
from ferrodist.rpc.rref_manager import CREATE, RRefManager

NUM_RANKS = 3


class SerialExecutor:
    """That of one process, whose tasks are run one at a time when the world says so."""

    def __init__(self, name):
        self.queue = deque()

    def submit(self, task):
        self.queue.append(task)

    def close(self):
        self.queue.clear()


class Connection:
    """A connection of two processes, with the messages under way."""

    def __init__(self, one, other):
        self.ends = {one.rank: one, other.rank: other}
        self.to = {one.rank: deque(), other.rank: deque()}
        self.to_join = {one.rank, other.rank}
        self.is_over = False

    def send(self, process, *message):
        """Send a message; raises if this end knows that the connection is over."""
        if process.neighbors.get(self.other(process).rank) is not self:
            raise PeerLostError("over", ranks=(self.other(process).rank,))
        if not self.is_over:
            self.to[self.other(process).rank].append(message)

    def other(self, process):
        return next(each for rank, each in self.ends.items() if rank != process.rank)


def without_frames(error):
    """Strip an error of its frames, which hold references."""
    error.__traceback__ = error.__context__ = None
    return error


class Process:
    """One process of a rank: the references of an agent, and fakes of its client and server."""

    world_size = NUM_RANKS
    timeout = 1.0

    def __init__(self, world, rank, incarnation):
        self.world = world
        self.rank = rank
        self.incarnation = incarnation
        self.neighbors = {}
        self.waiting = {}  # calls of its own without an answer: (peer, future), by number
        self.undecoded = []  # calls that wait for a worker
        self.references = []
        self.is_alive = True
        self.handlers = {}  # of internal calls, by name
        self.objects = RRefManager(rank, NUM_RANKS, self.timeout, None, allow_pickle=False)
        self.table = self.objects.refcounts.table
        self.objects.bind(self, self)

    # An `RpcClient` and an `RpcServer`.

    def _connection(self, to):
        if to not in self.neighbors:
            raise PeerLostError("it is not there", ranks=(to,))
        return self.neighbors[to]

    def call_internal(self, to, call, seconds):
        return self._call(to, call)

    def call_async(self, to, call, seconds):
        return self._call(to, call)

    def notify(self, to, name, make_arguments):
        connection = self._connection(to)
        arguments = make_arguments()
        if arguments is not None:
            connection.send(self, "notice", None, self.objects.pack(to, pack_call, Call(name, arguments, {}))[0])

    def _call(self, to, call, kind="internal"):
        future = Future(None)
        number = self.world.next_number()

        def failed(error):
            if self.waiting.pop(number, None):
                future.set_exception(without_frames(error))

        try:
            connection = self._connection(to)
            content, passing = self.objects.pack(to, pack_call, call)
            self.waiting[number] = to, future
            if passing is None:
                connection.send(self, kind, number, content)
            else:
                future._sent = passing.send(
                    lambda: connection.send(self, kind, number, content), failed, Deadline(self.timeout)
                )
                future.add_done_callback(passing.forget)
        except DistributedError as error:
            failed(error)
            if not future.done():
                future.set_exception(without_frames(error))
        return future

    def register_internal(self, name, handler, *, is_prefix=False):
        self.handlers[name] = handler

    def submit(self, incoming, call, function=None):
        self.respond(incoming, call.arguments[0])

    def respond(self, incoming, value):
        incoming.answer(incoming.on_result(value) if incoming.on_result else value)

    # What the world does with it.

    def join(self, connection):
        peer = connection.other(self)
        if peer.rank in self.neighbors:
            self.lose(peer.rank)
        self.objects.refcounts.on_joined(peer.rank, peer.incarnation)
        self.neighbors[peer.rank] = connection
        self.notify(peer.rank, MET, lambda: ())

    def lose(self, rank):
        connection = self.neighbors.pop(rank)
        connection.is_over = True
        connection.to[self.rank].clear()
        connection.to_join.discard(self.rank)
        for number, (peer, future) in list(self.waiting.items()):
            if peer == rank:
                del self.waiting[number]
                future.set_exception(PeerLostError("lost", ranks=(rank,)))
        self.objects.refcounts.on_lost(rank, None)
        self.undecoded = [
            (peer, content, answer, peer == rank or gone) for peer, content, answer, gone in self.undecoded
        ]

    def take(self, connection):
        kind, number, content = connection.to[self.rank].popleft()
        peer = connection.other(self).rank
        if kind == "answer":
            self.world.seen["a message that may not go"] += content is False
            if number in self.waiting:
                _, future = self.waiting.pop(number)
                if isinstance(content, Failure):
                    future.set_exception(RpcError(content.text))
                else:
                    future.set_result(content)
            return

        def answer(found):
            if kind != "notice":
                with contextlib.suppress(PeerLostError):
                    connection.send(self, "answer", number, found if isinstance(found, (Failure, bool)) else None)

        if kind == "call":
            self.undecoded.append((peer, content, answer, False))
        else:
            self.serve(peer, content, answer)

    def serve(self, peer, content, answer):
        try:
            call = unpack_call(content, peer, self.objects.leaf_codecs[peer])
        except PeerLostError as error:
            self.world.seen["an object that was refused"] += 1
            answer(Failure(FailureKind.UNDECODABLE, "", str(error), ""))
        else:
            self.world.seen[call.name] += 1
            incoming = SimpleNamespace(peer=SimpleNamespace(rank=peer), answer=answer, on_result=None)
            try:
                self.handlers[call.name](incoming, call)
            except (RpcError, ValueError) as error:
                answer(Failure(FailureKind.UNKNOWN, "", str(error), ""))

    def decode(self, index):
        peer, content, answer, is_lost = self.undecoded.pop(index)
        try:
            call = unpack_call(content, peer, self.objects.leaf_codecs[peer])
        except PeerLostError:
            self.world.seen["a reference that was refused"] += 1
        else:
            self.references += [] if is_lost else call.arguments[0]
        answer(None)


class World:
    """All processes, and a random course of events.

    Args:
        seed: The seed of the random choices.
        breaks: Whether connections break whose ends both live.
    """

    def __init__(self, seed, *, breaks):
        self.random = random.Random(seed)
        self.breaks = breaks
        self.numbers = 0
        self.seen = Counter()
        self.processes = [Process(self, rank, 0) for rank in range(NUM_RANKS)]
        self.connections = []
        self.owners = {}  # by object: the process that keeps it
        self.unmade = set()  # of them: those that are not known to have been made

    def next_number(self):
        self.numbers += 1
        return self.numbers

    # Events. Each list of them is of what may happen now.

    def steps(self):
        """Events that happen by themselves."""
        found = []
        for connection in self.connections:
            for rank, process in connection.ends.items():
                if not process.is_alive:
                    continue
                is_joined = process.neighbors.get(connection.other(process).rank) is connection
                if rank in connection.to_join:
                    if not connection.is_over:
                        found.append(lambda c=connection, p=process: (c.to_join.discard(p.rank), p.join(c)))
                elif is_joined and connection.to[rank]:
                    found += 3 * [lambda c=connection, p=process: p.take(c)]
                elif is_joined and connection.is_over:
                    found.append(lambda c=connection, p=process: p.lose(c.other(p).rank))
        for process in self.alive():
            if process.objects.tasks.queue:
                found += 2 * [lambda p=process: p.objects.tasks.queue.popleft()()]
            if process.undecoded:
                found.append(lambda p=process: p.decode(self.random.randrange(len(p.undecoded))))
            for peer in self.alive():
                # The higher rank connects, once it knows of no connection; the lower one takes what is newer.
                if process.rank > peer.rank and not self.is_met(process, peer):
                    found.append(lambda one=process, other=peer: self.connections.append(Connection(one, other)))
        return found

    def is_met(self, higher, lower):
        """Whether the higher rank knows of a connection, or of one being made."""
        known = higher.neighbors.get(lower.rank)
        if known is not None:
            return True
        return any(
            higher.rank in each.to_join and each.other(higher) is lower and not each.is_over
            for each in self.connections
            if each.ends.get(higher.rank) is higher
        )

    def deeds(self):
        """Actions of users, deaths, starts and broken connections."""
        found = []
        for process in self.alive():
            found.append(lambda p=process: p.references.append(self.make(p, p.rank)))
            for peer in process.neighbors:
                found.append(lambda p=process, to=peer: p.references.append(self.make(p, to)))
                if process.references:
                    found += 6 * [lambda p=process, to=peer: self.send(p, to)]
            if process.references:
                found += 2 * [lambda p=process: p.references.pop(self.random.randrange(len(p.references)))]
        if self.random.random() < 0.08 and self.alive():
            found = [lambda: self.kill(self.random.choice(self.alive()))]
        dead = [process for process in self.processes if not process.is_alive]
        if dead and self.random.random() < 0.2:
            found = [lambda: self.restart(self.random.choice(dead))]
        if self.breaks and self.random.random() < 0.1:
            found = [self.cut]
        return found

    def alive(self):
        return [process for process in self.processes if process.is_alive]

    def make(self, process, to):
        if to == process.rank:
            reference = process.objects.own(1)
        else:
            chosen = self.choose(process) if process.references and self.random.random() < 0.3 else 1
            reference = process.objects.create(to, CREATE, ("make", (chosen,), {}), None)
            del chosen
            id_, creation = reference._record.id, reference._record.creation
            self.unmade.add(id_)
            creation.add_done_callback(lambda future: future.exception() or self.unmade.discard(id_))
        self.owners[reference._record.id] = self.processes[to]
        return reference

    def send(self, process, to):
        process._call(to, Call("hold", (self.choose(process),), {}), "call")

    def choose(self, process):
        return [self.random.choice(process.references) for _ in range(self.random.randrange(1, 3))]

    def kill(self, process):
        process.is_alive = False
        for connection in self.connections:
            if connection.ends.get(process.rank) is process:
                connection.is_over = True
        process.references.clear()

    def restart(self, process):
        self.processes[process.rank] = Process(self, process.rank, process.incarnation + 1)

    def cut(self):
        joined = [each for each in self.connections if not (each.is_over or each.to_join)]
        if joined:
            connection = self.random.choice(joined)
            connection.is_over = True
            for way in connection.to.values():
                for _ in range(self.random.randrange(len(way) + 1)):
                    way.pop()

    # The course.

    def run(self, num_steps):
        """Choose events, and check that nothing is freed too early."""
        for _ in range(num_steps):
            steps = self.steps()
            choices = steps if steps and self.random.random() < 0.7 else self.deeds() or steps
            if choices:
                self.random.choice(choices)()
            self.connections = [each for each in self.connections if self.matters(each)]
            if not self.breaks:
                self.check()

    def matters(self, connection):
        return any(
            process.is_alive
            and (rank in connection.to_join or connection in process.neighbors.values())
            and not (connection.is_over and rank in connection.to_join)
            for rank, process in connection.ends.items()
        )

    def check(self):
        """Check that objects of living owners are there while a living process has references."""
        for process in self.alive():
            for reference in process.references:
                id_ = reference._record.id
                owner = self.owners[id_]
                is_there = id_ in owner.table._owned or id_ in self.unmade or not owner.is_alive
                assert is_there, f"{reference} of rank {process.rank} was freed"

    def end(self):
        """Drop all references, finish all events, and check that nothing is left."""
        for process in self.processes:
            if not process.is_alive:
                self.restart(process)
        self.come_to_rest()
        for _ in range(3):
            if any(process.table._used or process.table._owned for process in self.processes):
                gc.collect()  # errors hold frames, which hold references
                self.come_to_rest()
        for process in self.processes:
            table = process.table
            assert not table._owned, [(each.id, each.counts) for each in table._owned.values()]
            assert not table._used
            assert not table._transfers.by_key
            assert not table._transfers.totals
            assert not process.waiting

    def come_to_rest(self):
        for _ in range(10_000):
            for process in self.processes:
                process.references.clear()
            steps = self.steps()
            if not steps:
                return
            self.random.choice(steps)()
        raise AssertionError("there is no end of messages")


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_freed_too_early_and_nothing_is_left(monkeypatch, breaks):
    """Three ranks pass references on, die, are started again, and lose each other."""
    monkeypatch.setattr(rref_manager, "SerialExecutor", SerialExecutor)
    seen = Counter()
    for seed in range(250):
        world = World(seed, breaks=breaks)
        try:
            world.run(130)
            world.end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen += world.seen
    assert min(seen[each] for each in (REGISTER, CONFIRM, RELEASE, UNREGISTER, SETTLE, LOST)) > 20, seen
    assert min(seen["a reference that was refused"], seen["a message that may not go"]) > 3, seen
