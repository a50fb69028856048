"""References under way between ranks, while messages are delayed, ranks die, and are started again.

Rank 0 owns the objects, rank 1 passes references on, and rank 2 receives them.
"""

import functools
import gc
import threading

import pytest

from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import PeerLostError, RpcError
from ferrodist.rpc.agent import RpcAgent
from ferrodist.rpc.refcount_protocol import CONFIRM, LOST, REGISTER, RELEASE
from ferrodist.rpc.transport import RpcBackend
from ferrodist.testing import check_leaks

PATIENCE = 60.0
OWNER, SENDER, RECEIVER = range(3)


def until(condition):
    """Wait until a condition holds."""
    deadline, never = Deadline(PATIENCE), threading.Event()
    while not condition():
        assert not deadline.expired
        gc.collect()
        never.wait(0.005)


class Counter:
    """The class of the objects."""

    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count


class ManualTransport(RpcBackend):
    """A rank whose connections a test makes."""

    def open(self, peers):
        self.peers = peers


class Cluster:
    """Three ranks' agents, which a test connects."""

    def __init__(self):
        self.agents = {}
        self.transports = {}
        self.incarnations = dict.fromkeys(range(3), 0)
        self.pairs = {}
        self.taken = []  # what rank 2 has got
        self.busy = threading.Event()  # what its only worker waits for
        self.busy.set()
        self.num_attempts = 0

    def start(self, rank, *peers):
        """Start a process of a rank, and connect it with others."""
        self.incarnations[rank] += 1
        transport = self.transports[rank] = ManualTransport(rank, 3, PATIENCE)
        functions = {"Counter": Counter, "Holder": list, "take": self.taken.append, "wait": self.busy.wait}
        self.agents[rank] = RpcAgent(transport, functions, num_workers=1)
        for peer in peers:
            self.connect(rank, peer)

    def connect(self, one, other):
        """Make a connection, which both get to know."""
        for rank in (one, other):
            self.introduce(rank, one + other - rank)

    def introduce(self, rank, peer):
        """The same, of which one of the two gets to know; the second time it is the other one."""
        key = frozenset((rank, peer))
        if rank not in self.pairs.get(key, {}):
            self.num_attempts += 1
            self.pairs[key] = dict(zip(sorted(key), SimulatedBackend.create_group(2), strict=True))
        pair = self.pairs[key].pop(rank)
        self.transports[rank].peers.joined(peer, pair, (self.incarnations[peer], self.num_attempts))

    def cut(self, one, other):
        """End a connection whose ends live on, and see that both know."""
        peers = self.agents[one]._peers._peers
        peers[other].group.abort("a cut")
        until(lambda: other not in peers and one not in self.agents[other]._peers._peers)

    def kill(self, rank):
        """End a process, as those that it was connected with get to know."""
        agent = self.agents.pop(rank)
        peers = [peer for peer in agent._peers._peers if peer != rank]
        for peer in peers:
            agent._peers._peers[peer].group.abort("it dies")
        for peer in peers:
            others = self.agents[peer]._peers._peers
            until(lambda others=others: rank not in others)
        agent.close()

    def hold(self, rank, peer, name):
        """Delay the messages of a rank to another one which have a name in them; see `DelayedMessages`."""
        return DelayedMessages(self.agents[rank]._peers._peers[peer], name)

    def rest(self, *ranks):
        """Return when ranks have given back all references that are gone."""
        gc.collect()
        for rank in (*ranks, OWNER):
            done = threading.Event()
            self.agents[rank]._rrefs.tasks.submit(done.set)
            assert done.wait(PATIENCE)
            self.agents[rank].rpc_sync(OWNER, "wait", 0)  # comes after what was said before

    def object(self):
        """A reference of rank 1's to an object of rank 0's, which has been made."""
        counter = self.agents[SENDER].remote(OWNER, "Counter")
        assert counter.rpc_sync().add() == 1
        return counter

    def kept(self):
        """The number of objects that rank 0 owns, and of references under way to them."""
        table = self.agents[OWNER]._rrefs.refcounts.table
        return len(table._owned), sum(table._transfers.totals.values())


class DelayedMessages:
    """Delayed messages, in their order; those after `let_go` are sent at once."""

    def __init__(self, peer, name):
        self.messages = []
        self.is_over = False
        self._name = name.encode()
        self._send = peer.send
        peer.send = self.send

    def send(self, kind, number, content):
        text = content if isinstance(content, bytes) else repr(content.spec).encode()
        if self._name in text and not self.is_over:
            self.messages.append(functools.partial(self._send, kind, number, content))
        else:
            self._send(kind, number, content)

    def wait(self, count=1):
        until(lambda: len(self.messages) >= count)

    def let_go(self):
        self.is_over = True
        for message in self.messages:
            message()


@pytest.fixture
def cluster():
    """Three connected ranks, which own nothing in the end."""
    made = Cluster()
    with check_leaks():
        for rank in range(3):
            made.start(rank, *range(rank))
        yield made
        made.taken.clear()
        made.busy.set()
        until(lambda: made.kept() == (0, 0))
        for agent in made.agents.values():
            agent.close()


def test_the_sender_dies_before_it_has_sent(cluster):
    """The receiver confirms that nothing arrived, and the registration ends."""
    held = cluster.hold(SENDER, RECEIVER, "take")
    cluster.agents[SENDER].rpc_async(RECEIVER, "take", cluster.object())
    held.wait()
    assert cluster.kept() == (1, 1)
    cluster.kill(SENDER)
    until(lambda: cluster.kept() == (0, 0))
    assert len(cluster.agents[RECEIVER]._rrefs.refcounts.table._refused) == 1
    cluster.start(SENDER, RECEIVER, OWNER)
    assert not cluster.agents[RECEIVER]._rrefs.refcounts.table._refused  # nothing comes of what is gone
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", cluster.object())
    assert cluster.taken[0].rpc_sync().add() == 2


def test_the_sender_dies_before_its_message_is_confirmed(cluster):
    """The receiver has the reference, and the object lives, whenever the confirmation arrives."""
    held = cluster.hold(RECEIVER, OWNER, CONFIRM)
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", cluster.object())
    held.wait()
    cluster.kill(SENDER)
    held.wait(2)  # the answer to what the owner has asked
    assert cluster.kept() == (1, 1)
    held.let_go()
    until(lambda: cluster.kept() == (1, 0))
    assert cluster.taken[0].rpc_sync().add() == 2


def test_a_message_that_arrives_after_it_was_settled(cluster):
    """It is refused: its sender gets an error, and other references in it are given back."""
    own, its = cluster.agents[SENDER].reference(1), cluster.agents[SENDER].remote(RECEIVER, "Counter")
    its.rpc_sync().add()
    cluster.busy.clear()
    waiting = cluster.agents[SENDER].rpc_async(RECEIVER, "wait", PATIENCE)
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", [cluster.object(), own, its])
    until(lambda: cluster.kept() == (1, 1))
    until(lambda: len(cluster.agents[RECEIVER]._executor._queue) == 1 or call.done())
    cluster.cut(OWNER, SENDER)
    until(lambda: cluster.kept() == (0, 0))
    cluster.busy.set()
    waiting.result()
    with pytest.raises(RpcError, match="rank 0 has lost rank 1, which had sent a reference to an object there"):
        call.result()
    assert cluster.taken == []
    until(lambda: cluster.agents[SENDER].num_references().for_others == 0)
    cluster.connect(OWNER, SENDER)
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", cluster.object())  # what comes now has another transfer id
    assert cluster.taken[0].rpc_sync().add() == 2


def test_an_object_made_of_settled_references(cluster):
    """It is not made; its creator gets an error."""
    counter = cluster.object()
    held = cluster.hold(SENDER, RECEIVER, "Holder")
    holder = cluster.agents[SENDER].remote(RECEIVER, "Holder", counter)
    held.wait()
    cluster.cut(OWNER, SENDER)
    until(lambda: cluster.kept() == (0, 0))
    held.let_go()
    assert "rank 0 has lost rank 1" in str(holder._record.creation.exception())
    with pytest.raises(RpcError, match="the object was freed"):
        holder.to_here()


def test_a_result_that_arrives_after_it_was_settled(cluster):
    """The caller's error says that the rank which sent it was lost."""
    cluster.agents[SENDER].register("give", functools.partial(cluster.object))
    held = cluster.hold(SENDER, RECEIVER, "rref")
    call = cluster.agents[RECEIVER].rpc_async(SENDER, "give")
    held.wait()
    cluster.cut(OWNER, SENDER)
    until(lambda: cluster.kept() == (0, 0))
    held.let_go()
    with pytest.raises(PeerLostError, match="rank 0 has lost rank 1"):
        call.result()


def test_the_receiver_restarts_before_references_are_registered(cluster):
    """The sender does not know yet: its registration is for a dead process, and is refused."""
    counter = cluster.object()
    held = cluster.hold(SENDER, OWNER, REGISTER)
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", counter)
    held.wait()
    cluster.agents[OWNER]._peers._peers[RECEIVER].group.abort("it dies, as one knows")
    until(lambda: RECEIVER not in cluster.agents[OWNER]._peers._peers)
    old = cluster.agents[RECEIVER]
    cluster.start(RECEIVER, OWNER)
    held.let_go()
    with pytest.raises(
        PeerLostError, match="can't be sent references to objects of rank 0, which has lost it"
    ) as error:
        call.result()
    assert error.value.ranks == (RECEIVER,)
    assert cluster.kept() == (1, 0)
    cluster.connect(SENDER, RECEIVER)
    old.close()
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    assert cluster.taken[0].rpc_sync().add() == 2


def test_the_receiver_restarts_before_it_confirms(cluster):
    """The next process has no counts of the one before, and gives none back."""
    counter = cluster.object()
    held = cluster.hold(RECEIVER, OWNER, CONFIRM)
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    held.wait()
    assert cluster.kept() == (1, 1)
    cluster.kill(RECEIVER)
    cluster.taken.clear()
    assert cluster.kept() == (1, 0)
    cluster.start(RECEIVER, OWNER, SENDER)
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    del counter
    cluster.rest(SENDER)
    assert cluster.taken.pop().rpc_sync().add() == 2


@pytest.mark.parametrize("is_met", [False, True])
def test_a_receiver_that_the_owner_has_not_met(cluster, is_met):
    """The message waits until both know of their connection, or until they can't any more."""
    counter = cluster.object()
    cluster.kill(RECEIVER)
    cluster.start(RECEIVER, SENDER)
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", counter)
    until(lambda: cluster.kept() == (1, 1))
    cluster.introduce(OWNER, RECEIVER)
    assert not call.done()
    if is_met:
        cluster.introduce(RECEIVER, OWNER)
        call.result()
        assert cluster.taken[0].rpc_sync().add() == 2
    else:
        cluster.agents[OWNER]._peers._peers[RECEIVER].group.abort("it dies")
        with pytest.raises(PeerLostError, match="can't be sent references"):
            call.result()
        cluster.pairs.clear()


def test_a_receiver_that_the_owner_never_meets(cluster):
    """The next process of its rank joins: the sender, which does not know of it yet, waits no more."""
    cluster.kill(RECEIVER)
    cluster.start(RECEIVER, SENDER)
    old = cluster.agents[RECEIVER]
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", cluster.object())
    until(lambda: cluster.kept() == (1, 1))
    cluster.start(RECEIVER, OWNER)
    with pytest.raises(PeerLostError, match="or knows that rank 2 was started again"):
        call.result()
    old.close()


def test_a_sender_that_gives_up_before_the_owner_has_met_the_receiver(cluster):
    """Its registration is dropped."""
    counter = cluster.object()
    cluster.kill(RECEIVER)
    cluster.start(RECEIVER, SENDER)
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", counter, timeout=0.05)
    assert "rank" in str(call.exception())
    until(lambda: cluster.kept() == (1, 0))


def test_sender_and_receiver_lose_each_other(cluster):
    """The message is lost between them, though both live: the owner learns of it, and asks the receiver."""
    counter = cluster.object()
    message = cluster.hold(SENDER, RECEIVER, "take")
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", counter)
    message.wait()
    lost = cluster.hold(SENDER, OWNER, LOST)
    cluster.cut(SENDER, RECEIVER)
    with pytest.raises(PeerLostError):
        call.result()
    lost.wait()
    cluster.connect(SENDER, RECEIVER)
    message = cluster.hold(SENDER, RECEIVER, "take")
    call = cluster.agents[SENDER].rpc_async(RECEIVER, "take", counter)  # is not what was lost
    message.wait()
    assert cluster.kept() == (1, 2)
    lost.let_go()
    until(lambda: cluster.kept() == (1, 1))
    message.let_go()
    call.result()
    until(lambda: cluster.kept() == (1, 0))
    del counter
    cluster.rest(SENDER)
    assert cluster.taken[0].rpc_sync().add() == 2


def test_a_receiver_that_the_owner_has_lost(cluster):
    """It is sent no reference that it could not use, though the sender is still connected with it."""
    cluster.cut(OWNER, RECEIVER)
    with pytest.raises(PeerLostError, match="can't be sent references to objects of rank 0, which has lost it"):
        cluster.agents[SENDER].rpc_sync(RECEIVER, "take", cluster.object())
    assert cluster.taken == []


def test_counts_of_a_broken_connection_are_not_given_back_by_the_next(cluster):
    """A reference on its way is counted, when the receiver drops those of both connections."""
    value = cluster.agents[OWNER].reference(Counter())
    cluster.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    cluster.cut(OWNER, RECEIVER)
    cluster.connect(OWNER, RECEIVER)
    cluster.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    assert cluster.taken[0] is cluster.taken[1]
    held = cluster.hold(OWNER, RECEIVER, "take")
    call = cluster.agents[OWNER].rpc_async(RECEIVER, "take", value)
    held.wait()
    released = cluster.hold(RECEIVER, OWNER, RELEASE)
    cluster.taken.clear()
    released.wait()
    released.let_go()
    kept = cluster.agents[OWNER]._rrefs.refcounts.table._owned
    until(lambda: [each.counts for each in kept.values()] == [{RECEIVER: 1}])
    held.let_go()
    call.result()
    assert cluster.taken[0].rpc_sync().add() == 1


def test_references_of_a_broken_connection_are_not_given_back_by_the_next(cluster):
    """The owner counts only the references on their way."""
    value = cluster.agents[OWNER].reference(Counter())
    cluster.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    cluster.cut(OWNER, RECEIVER)
    cluster.connect(OWNER, RECEIVER)
    held = cluster.hold(OWNER, RECEIVER, "take")
    call = cluster.agents[OWNER].rpc_async(RECEIVER, "take", value)
    held.wait()
    cluster.taken.clear()
    receiver = cluster.agents[RECEIVER]
    until(lambda: receiver.num_references().elsewhere == 0)
    cluster.rest(RECEIVER)
    held.let_go()
    call.result()
    del value
    cluster.rest()
    assert cluster.taken[0].rpc_sync().add() == 1


def test_the_connection_changes_while_references_are_given_back(cluster, monkeypatch):
    """A release by the new connection gives back only references that were counted in it."""
    values, calls = [cluster.agents[OWNER].reference(Counter())], []
    cluster.agents[OWNER].rpc_sync(RECEIVER, "take", values[0])
    client = cluster.agents[RECEIVER]._client
    notify = client.notify

    def notify_late(to, name, make):
        if name == RELEASE and not calls:
            cluster.cut(OWNER, RECEIVER)
            cluster.connect(OWNER, RECEIVER)
            calls.append(cluster.hold(OWNER, RECEIVER, "take"))
            calls.append(cluster.agents[OWNER].rpc_async(RECEIVER, "take", values[0]))
        return notify(to, name, make)

    monkeypatch.setattr(client, "notify", notify_late)
    cluster.taken.clear()
    until(lambda: len(calls) == 2)
    held, call = calls
    held.wait()
    cluster.rest(RECEIVER)
    held.let_go()
    call.result()
    values.clear()
    cluster.rest()
    assert cluster.taken[0].rpc_sync().add() == 1
    calls.clear()


def test_references_to_itself_are_not_given_back(cluster):
    """The owner has not counted them; another reference is on its way in the meantime."""
    counter = cluster.object()
    cluster.agents[SENDER].rpc_sync(OWNER, "take", counter)
    own = cluster.taken.pop()
    cluster.agents[SENDER].rpc_sync(SENDER, "take", counter)
    held = cluster.hold(OWNER, SENDER, "take")
    call = cluster.agents[OWNER].rpc_async(SENDER, "take", own)
    held.wait()
    cluster.taken.clear()
    del counter, own
    cluster.rest(SENDER)
    held.let_go()
    call.result()
    cluster.rest()
    assert cluster.taken[0].rpc_sync().add() == 2


def test_unsent_references_are_uncounted_in_their_own_connection(cluster):
    """A message fails with the old connection, after others were sent by the new one."""
    value = cluster.agents[OWNER].reference(Counter())
    table = cluster.agents[OWNER]._rrefs.refcounts.table
    counts = {value._record.id: 1}
    before = table.count(RECEIVER, counts)
    cluster.cut(OWNER, RECEIVER)
    cluster.connect(OWNER, RECEIVER)
    cluster.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    table.uncount(RECEIVER, counts, before)
    assert table._owned[value._record.id].counts == {RECEIVER: 1}


def test_nothing_is_counted_for_a_rank_that_is_not_there(cluster):
    """Its next process would never give the references back."""
    value = cluster.agents[OWNER].reference(Counter())
    cluster.kill(RECEIVER)
    cluster.agents[OWNER]._rrefs.refcounts.table.count(RECEIVER, {value._record.id: 1})
    assert cluster.agents[OWNER].num_references().for_others == 0
    del value


def test_a_reference_that_arrives_while_the_last_one_is_given_back(cluster):
    """It is confirmed first, though the release was queued before: no more is given back than was counted."""
    counter = cluster.object()
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    go = threading.Event()
    cluster.agents[RECEIVER]._rrefs.tasks.submit(lambda: go.wait(PATIENCE))
    cluster.taken.clear()
    gc.collect()
    cluster.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    cluster.taken.clear()
    gc.collect()
    go.set()
    del counter
    until(lambda: cluster.kept() == (0, 0))
