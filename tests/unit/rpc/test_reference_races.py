"""References on their way from rank to rank, while messages are held up, ranks die, and are started again.

Rank 0 owns the objects, rank 1 passes them on, and rank 2 gets them.
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
    """Wait for what comes of itself."""
    deadline, never = Deadline(PATIENCE), threading.Event()
    while not condition():
        assert not deadline.expired
        gc.collect()
        never.wait(0.005)


class Counter:
    """What is referred to."""

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
    """Three ranks' agents, any two of which are connected when told to be."""

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
        """Hold up the messages of a rank to another one which have a name in them; see `Held`."""
        return Held(self.agents[rank]._peers._peers[peer], name)

    def rest(self, *ranks):
        """Return when ranks have done, and told rank 0 of, what there was to do when references have gone."""
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
        """How many objects rank 0 keeps, and for how many references that are on their way."""
        table = self.agents[OWNER]._rrefs.refcounts.table
        return len(table._owned), sum(table._forks._totals.values())


class Held:
    """Messages that are held up, in their order; those that come after `let_go` go at once."""

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
    """Three ranks that know each other, and keep nothing in the end."""
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
    """What it had registered for the receiver is the receiver's no more, which says that nothing came."""
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
    """The receiver has the reference, and the object is there, whenever it says so."""
    held = town.hold(RECEIVER, OWNER, CONFIRM)
    town.agents[SENDER].rpc_sync(RECEIVER, "take", town.object())
    held.wait()
    town.kill(SENDER)
    held.wait(2)  # the answer to what the owner has asked
    assert town.kept() == (1, 1)
    held.let_go()
    until(lambda: town.kept() == (1, 0))
    assert town.taken[0].rpc_sync().add() == 2


def test_a_message_that_comes_when_nobody_counts_on_it_any_more(town):
    """It is not taken: its sender is told why, and other references in it are given back."""
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


def test_an_object_that_is_made_of_what_nobody_counts_on_any_more(town):
    """It is not made; who asked for it is told why."""
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


def test_a_result_that_comes_when_nobody_counts_on_it_any_more(town):
    """Whoever waits for it is told that the rank which sent it was lost."""
    town.agents[SENDER].register("give", functools.partial(town.object))
    held = town.hold(SENDER, RECEIVER, "rref")
    call = town.agents[RECEIVER].rpc_async(SENDER, "give")
    held.wait()
    town.cut(OWNER, SENDER)
    until(lambda: town.kept() == (0, 0))
    held.let_go()
    with pytest.raises(PeerLostError, match="rank 0 has lost rank 1"):
        call.result()


def test_the_receiver_is_started_again_before_the_owner_is_asked(town):
    """The sender does not know yet: what it registers is for a process that is gone, and is refused."""
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


def test_the_receiver_is_started_again_before_it_has_confirmed(town):
    """Its next process is not counted for what the one before got, and gives none of it back."""
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
    """The message waits until both know of their connection; or until it is sure that they won't."""
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
    """The next process of its rank comes: the sender, which does not know of that one yet, waits no more."""
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
    """What it has registered is forgotten."""
    counter = town.object()
    town.kill(RECEIVER)
    town.start(RECEIVER, SENDER)
    call = town.agents[SENDER].rpc_async(RECEIVER, "take", counter, timeout=0.05)
    assert "rank" in str(call.exception())
    until(lambda: town.kept() == (1, 0))


def test_sender_and_receiver_lose_each_other(town):
    """The message is lost between them, though both live: the owner is told, and asks the receiver."""
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
    """It is sent no reference to what it could not use, though the sender still has it."""
    town.cut(OWNER, RECEIVER)
    with pytest.raises(PeerLostError, match="can't be sent references to objects of rank 0, which has lost it"):
        town.agents[SENDER].rpc_sync(RECEIVER, "take", town.object())
    assert town.taken == []


def test_what_was_counted_before_a_break_is_not_given_back_after_it(town):
    """A reference that is on its way is still one, when the receiver lets those of both connections go."""
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


def test_what_has_come_before_a_break_is_not_given_back_after_it(town):
    """The owner counts nothing of it any more, but what is on its way."""
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
    """What goes by the new one was counted in it: by then the owner counts what is on its way there."""
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


def test_what_a_rank_sends_itself_is_not_given_back(town):
    """The owner has counted nothing of that; something else is on its way meanwhile."""
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


def test_what_could_not_be_sent_to_one_connection_is_not_taken_off_another_one(town):
    """A message that fails with the old one, when there is a new one, by which others have gone."""
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
    """Its next process would never give it back."""
    value = town.agents[OWNER].reference(Counter())
    town.kill(RECEIVER)
    town.agents[OWNER]._rrefs.refcounts.table.count(RECEIVER, {value._record.id: 1})
    assert town.agents[OWNER].num_references().for_others == 0
    del value


def test_a_reference_that_comes_while_the_last_one_is_given_back(town):
    """It is confirmed first, though it was the older errand to give back: no more is given back than was counted."""
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
