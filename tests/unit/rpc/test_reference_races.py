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


class Place(RpcBackend):
    """A rank whose connections a test makes."""

    def open(self, peers):
        self.peers = peers


class Town:
    """Three ranks' agents, which a test connects."""

    def __init__(self):
        self.agents = {}
        self.places = {}
        self.incarnations = dict.fromkeys(range(3), 0)
        self.pairs = {}
        self.taken = []  # what rank 2 has got
        self.busy = threading.Event()  # what its only worker waits for
        self.busy.set()
        self.num_attempts = 0

    def start(self, rank, *peers):
        """Start a process of a rank, and connect it with others."""
        self.incarnations[rank] += 1
        place = self.places[rank] = Place(rank, 3, PATIENCE)
        functions = {"Counter": Counter, "Holder": list, "take": self.taken.append, "wait": self.busy.wait}
        self.agents[rank] = RpcAgent(place, functions, num_workers=1)
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
        self.places[rank].peers.joined(peer, pair, (self.incarnations[peer], self.num_attempts))

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
        """Delay the messages of a rank to another one which have a name in them; see `Held`."""
        return Held(self.agents[rank]._peers._peers[peer], name)

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
        return len(table._owned), sum(table._forks.totals.values())


class Held:
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
def town():
    """Three connected ranks, which own nothing in the end."""
    made = Town()
    with check_leaks():
        for rank in range(3):
            made.start(rank, *range(rank))
        yield made
        made.taken.clear()
        made.busy.set()
        until(lambda: made.kept() == (0, 0))
        for agent in made.agents.values():
            agent.close()


def test_the_sender_dies_before_it_has_sent(town):
    """The receiver confirms that nothing arrived, and the registration ends."""
    held = town.hold(SENDER, RECEIVER, "take")
    town.agents[SENDER].rpc_async(RECEIVER, "take", town.object())
    held.wait()
    assert town.kept() == (1, 1)
    town.kill(SENDER)
    until(lambda: town.kept() == (0, 0))
    assert len(town.agents[RECEIVER]._rrefs.refcounts.table._refused) == 1
    town.start(SENDER, RECEIVER, OWNER)
    assert not town.agents[RECEIVER]._rrefs.refcounts.table._refused  # nothing comes of what is gone
    town.agents[SENDER].rpc_sync(RECEIVER, "take", town.object())
    assert town.taken[0].rpc_sync().add() == 2


def test_the_sender_dies_before_its_message_is_confirmed(town):
    """The receiver has the reference, and the object lives, whenever the confirmation arrives."""
    held = town.hold(RECEIVER, OWNER, CONFIRM)
    town.agents[SENDER].rpc_sync(RECEIVER, "take", town.object())
    held.wait()
    town.kill(SENDER)
    held.wait(2)  # the answer to what the owner has asked
    assert town.kept() == (1, 1)
    held.let_go()
    until(lambda: town.kept() == (1, 0))
    assert town.taken[0].rpc_sync().add() == 2


def test_a_message_that_arrives_after_it_was_settled(town):
    """It is refused: its sender gets an error, and other references in it are given back."""
    own, its = town.agents[SENDER].reference(1), town.agents[SENDER].remote(RECEIVER, "Counter")
    its.rpc_sync().add()
    town.busy.clear()
    waiting = town.agents[SENDER].rpc_async(RECEIVER, "wait", PATIENCE)
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", [town.object(), own, its])
    until(lambda: town.kept() == (1, 1))
    until(lambda: len(town.agents[RECEIVER]._executor._queue) == 1 or call.done())
    town.cut(OWNER, SENDER)
    until(lambda: town.kept() == (0, 0))
    town.busy.set()
    waiting.result()
    with pytest.raises(RpcError, match="rank 0 has lost rank 1, which had sent a reference to an object there"):
        call.result()
    assert town.taken == []
    until(lambda: town.agents[SENDER].num_references().for_others == 0)
    town.connect(OWNER, SENDER)
    town.agents[SENDER].rpc_sync(RECEIVER, "take", town.object())  # what comes now has another ticket
    assert town.taken[0].rpc_sync().add() == 2


def test_an_object_made_of_settled_references(town):
    """It is not made; its creator gets an error."""
    counter = town.object()
    held = town.hold(SENDER, RECEIVER, "Holder")
    holder = town.agents[SENDER].remote(RECEIVER, "Holder", counter)
    held.wait()
    town.cut(OWNER, SENDER)
    until(lambda: town.kept() == (0, 0))
    held.let_go()
    assert "rank 0 has lost rank 1" in str(holder._record.creation.exception())
    with pytest.raises(RpcError, match="the object was freed"):
        holder.to_here()


def test_a_result_that_arrives_after_it_was_settled(town):
    """The caller's error says that the rank which sent it was lost."""
    town.agents[SENDER].register("give", functools.partial(town.object))
    held = town.hold(SENDER, RECEIVER, "rref")
    call = town.agents[RECEIVER].rpc_async(SENDER, "give")
    held.wait()
    town.cut(OWNER, SENDER)
    until(lambda: town.kept() == (0, 0))
    held.let_go()
    with pytest.raises(PeerLostError, match="rank 0 has lost rank 1"):
        call.result()


def test_the_receiver_restarts_before_references_are_registered(town):
    """The sender does not know yet: its registration is for a dead process, and is refused."""
    counter = town.object()
    held = town.hold(SENDER, OWNER, REGISTER)
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", counter)
    held.wait()
    town.agents[OWNER]._peers._peers[RECEIVER].group.abort("it dies, as one knows")
    until(lambda: RECEIVER not in town.agents[OWNER]._peers._peers)
    old = town.agents[RECEIVER]
    town.start(RECEIVER, OWNER)
    held.let_go()
    with pytest.raises(
        PeerLostError, match="can't be sent references to objects of rank 0, which has lost it"
    ) as error:
        call.result()
    assert error.value.ranks == (RECEIVER,)
    assert town.kept() == (1, 0)
    town.connect(SENDER, RECEIVER)
    old.close()
    town.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    assert town.taken[0].rpc_sync().add() == 2


def test_the_receiver_restarts_before_it_confirms(town):
    """The next process has no counts of the one before, and gives none back."""
    counter = town.object()
    held = town.hold(RECEIVER, OWNER, CONFIRM)
    town.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    held.wait()
    assert town.kept() == (1, 1)
    town.kill(RECEIVER)
    town.taken.clear()
    assert town.kept() == (1, 0)
    town.start(RECEIVER, OWNER, SENDER)
    town.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    del counter
    town.rest(SENDER)
    assert town.taken.pop().rpc_sync().add() == 2


@pytest.mark.parametrize("is_met", [False, True])
def test_a_receiver_that_the_owner_has_not_met(town, is_met):
    """The message waits until both know of their connection, or until they can't any more."""
    counter = town.object()
    town.kill(RECEIVER)
    town.start(RECEIVER, SENDER)
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", counter)
    until(lambda: town.kept() == (1, 1))
    town.introduce(OWNER, RECEIVER)
    assert not call.done()
    if is_met:
        town.introduce(RECEIVER, OWNER)
        call.result()
        assert town.taken[0].rpc_sync().add() == 2
    else:
        town.agents[OWNER]._peers._peers[RECEIVER].group.abort("it dies")
        with pytest.raises(PeerLostError, match="can't be sent references"):
            call.result()
        town.pairs.clear()


def test_a_receiver_that_the_owner_never_meets(town):
    """The next process of its rank joins: the sender, which does not know of it yet, waits no more."""
    town.kill(RECEIVER)
    town.start(RECEIVER, SENDER)
    old = town.agents[RECEIVER]
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", town.object())
    until(lambda: town.kept() == (1, 1))
    town.start(RECEIVER, OWNER)
    with pytest.raises(PeerLostError, match="or knows that it was started again"):
        call.result()
    old.close()


def test_a_sender_that_gives_up_before_the_owner_has_met_the_receiver(town):
    """Its registration is dropped."""
    counter = town.object()
    town.kill(RECEIVER)
    town.start(RECEIVER, SENDER)
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", counter, timeout=0.05)
    assert "rank" in str(call.exception())
    until(lambda: town.kept() == (1, 0))


def test_sender_and_receiver_lose_each_other(town):
    """The message is lost between them, though both live: the owner learns of it, and asks the receiver."""
    counter = town.object()
    message = town.hold(SENDER, RECEIVER, "take")
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", counter)
    message.wait()
    lost = town.hold(SENDER, OWNER, LOST)
    town.cut(SENDER, RECEIVER)
    with pytest.raises(PeerLostError):
        call.result()
    lost.wait()
    town.connect(SENDER, RECEIVER)
    message = town.hold(SENDER, RECEIVER, "take")
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", counter)  # is not what was lost
    message.wait()
    assert town.kept() == (1, 2)
    lost.let_go()
    until(lambda: town.kept() == (1, 1))
    message.let_go()
    call.result()
    until(lambda: town.kept() == (1, 0))
    del counter
    town.rest(SENDER)
    assert town.taken[0].rpc_sync().add() == 2


def test_a_receiver_that_the_owner_has_lost(town):
    """It is sent no reference that it could not use, though the sender is still connected with it."""
    town.cut(OWNER, RECEIVER)
    with pytest.raises(PeerLostError, match="can't be sent references to objects of rank 0, which has lost it"):
        town.agents[SENDER].rpc_sync(RECEIVER, "take", town.object())
    assert town.taken == []


def test_counts_of_a_broken_connection_are_not_given_back_by_the_next(town):
    """A reference on its way is counted, when the receiver drops those of both connections."""
    value = town.agents[OWNER].reference(Counter())
    town.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    town.cut(OWNER, RECEIVER)
    town.connect(OWNER, RECEIVER)
    town.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    assert town.taken[0] is town.taken[1]
    held = town.hold(OWNER, RECEIVER, "take")
    call = town.agents[OWNER].rpc_async(RECEIVER, "take", value)
    held.wait()
    released = town.hold(RECEIVER, OWNER, RELEASE)
    town.taken.clear()
    released.wait()
    released.let_go()
    kept = town.agents[OWNER]._rrefs.refcounts.table._owned
    until(lambda: [each.counts for each in kept.values()] == [{RECEIVER: 1}])
    held.let_go()
    call.result()
    assert town.taken[0].rpc_sync().add() == 1


def test_references_of_a_broken_connection_are_not_given_back_by_the_next(town):
    """The owner counts only the references on their way."""
    value = town.agents[OWNER].reference(Counter())
    town.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    town.cut(OWNER, RECEIVER)
    town.connect(OWNER, RECEIVER)
    held = town.hold(OWNER, RECEIVER, "take")
    call = town.agents[OWNER].rpc_async(RECEIVER, "take", value)
    held.wait()
    town.taken.clear()
    receiver = town.agents[RECEIVER]
    until(lambda: receiver.num_references().elsewhere == 0)
    town.rest(RECEIVER)
    held.let_go()
    call.result()
    del value
    town.rest()
    assert town.taken[0].rpc_sync().add() == 1


def test_the_connection_changes_while_references_are_given_back(town, monkeypatch):
    """A release by the new connection gives back only references that were counted in it."""
    values, calls = [town.agents[OWNER].reference(Counter())], []
    town.agents[OWNER].rpc_sync(RECEIVER, "take", values[0])
    client = town.agents[RECEIVER]._client
    notify = client.notify

    def notify_late(to, name, make):
        if name == RELEASE and not calls:
            town.cut(OWNER, RECEIVER)
            town.connect(OWNER, RECEIVER)
            calls.append(town.hold(OWNER, RECEIVER, "take"))
            calls.append(town.agents[OWNER].rpc_async(RECEIVER, "take", values[0]))
        return notify(to, name, make)

    monkeypatch.setattr(client, "notify", notify_late)
    town.taken.clear()
    until(lambda: len(calls) == 2)
    held, call = calls
    held.wait()
    town.rest(RECEIVER)
    held.let_go()
    call.result()
    values.clear()
    town.rest()
    assert town.taken[0].rpc_sync().add() == 1
    calls.clear()


def test_references_to_itself_are_not_given_back(town):
    """The owner has not counted them; another reference is on its way in the meantime."""
    counter = town.object()
    town.agents[SENDER].rpc_sync(OWNER, "take", counter)
    own = town.taken.pop()
    town.agents[SENDER].rpc_sync(SENDER, "take", counter)
    held = town.hold(OWNER, SENDER, "take")
    call = town.agents[OWNER].rpc_async(SENDER, "take", own)
    held.wait()
    town.taken.clear()
    del counter, own
    town.rest(SENDER)
    held.let_go()
    call.result()
    town.rest()
    assert town.taken[0].rpc_sync().add() == 2


def test_unsent_references_are_uncounted_in_their_own_connection(town):
    """A message fails with the old connection, after others were sent by the new one."""
    value = town.agents[OWNER].reference(Counter())
    table = town.agents[OWNER]._rrefs.refcounts.table
    counts = {value._record.id: 1}
    before = table.count(RECEIVER, counts)
    town.cut(OWNER, RECEIVER)
    town.connect(OWNER, RECEIVER)
    town.agents[OWNER].rpc_sync(RECEIVER, "take", value)
    table.uncount(RECEIVER, counts, before)
    assert table._owned[value._record.id].counts == {RECEIVER: 1}


def test_nothing_is_counted_for_a_rank_that_is_not_there(town):
    """Its next process would never give the references back."""
    value = town.agents[OWNER].reference(Counter())
    town.kill(RECEIVER)
    town.agents[OWNER]._rrefs.refcounts.table.count(RECEIVER, {value._record.id: 1})
    assert town.agents[OWNER].num_references().for_others == 0
    del value


def test_a_reference_that_arrives_while_the_last_one_is_given_back(town):
    """It is confirmed first, though the release was queued before: no more is given back than was counted."""
    counter = town.object()
    town.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    go = threading.Event()
    town.agents[RECEIVER]._rrefs.tasks.submit(lambda: go.wait(PATIENCE))
    town.taken.clear()
    gc.collect()
    town.agents[SENDER].rpc_sync(RECEIVER, "take", counter)
    town.taken.clear()
    gc.collect()
    go.set()
    del counter
    until(lambda: town.kept() == (0, 0))
