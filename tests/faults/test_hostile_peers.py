"""The trials of `tests/stress/hostile_peers.py`, a few rounds of each."""

from __future__ import annotations

import os

import pytest
from stress import hostile_peers

from ferrodist.errors import AuthenticationError, DistributedError

_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")


@_AS_ROOT
@pytest.mark.parametrize("way", ["tcp over tcp://", "NativeBackend", "TcpRpcBackend", "torch's TCPStore"])
def test_another_user_is_no_rank(way):
    """A process of another user that nobody has told a secret is refused by a job that was started without any."""
    ((ours, theirs),) = hostile_peers.other_users(seconds=1.0, only=(way,)).values()
    assert theirs.startswith("AuthenticationError")
    assert "FERRODIST_SECRET" in theirs
    assert "joined" not in (ours, theirs)


@_AS_ROOT
@pytest.mark.parametrize("way", ["tcp over tcp://", "torch's TCPStore"])
def test_nobody_joins_another_users_rank_0(way):
    """A rank that finds a process of another user in the place of rank 0 raises, and does not take its word."""
    ((theirs, ours),) = hostile_peers.other_users(seconds=1.0, only=(way,), as_rank=0).values()
    assert ours.startswith("AuthenticationError")
    assert "joined" not in (ours, theirs)


@_AS_ROOT
@pytest.mark.parametrize("way", ["native over tcp://", "torch's TCPStore"])
def test_two_processes_of_one_user_meet_without_any_setting(way):
    """The same jobs go on working for their user."""
    said = hostile_peers.other_users(os.geteuid(), seconds=20.0, only=(way,))
    assert said == {way: ("joined", "joined")}


@_AS_ROOT
def test_who_has_opened_torchs_file_reads_no_secret():
    """torch makes its file readable by all: whoever opened it at once would read what is written once it is hidden."""
    assert set(hostile_peers.read_along(1, seconds=20.0)) == {"none was read, joined and joined"}


@pytest.mark.parametrize("program", ["store", "hub"])
def test_a_faithful_relay_is_no_hindrance(program):
    """Jobs behind proxies and port forwards go on working."""
    assert hostile_peers.classify(hostile_peers.through_relay(program, None, seconds=20)) == "right"


@pytest.mark.parametrize("program", ["store", "hub"])
def test_a_relay_that_changes_something_is_noticed(program):
    """A bit, a piece left out, repeated or put in on the way is an error, and never another number."""
    counts = hostile_peers.tampered(program, 4, seed=1, seconds=1.5)
    assert set(counts) <= {"an error", "right, unchanged"}
    assert counts["an error"]


def test_a_relay_that_changes_an_address():
    """The rank that would be sent elsewhere says who was not believed, and why."""
    change = hostile_peers.AddressChange()
    ours, theirs = hostile_peers.through_relay("store", change, seconds=2)
    assert change.num_changed
    assert isinstance(theirs, AuthenticationError)
    assert "its answer to GET job/default/tcp/address can't be trusted" in theirs.message
    assert isinstance(ours, DistributedError)


def test_a_store_that_sends_a_rank_elsewhere():
    """A rank that is sent to a relay raises, though that passes on all: it could change tensors."""
    ours, theirs = hostile_peers.other_hub(seconds=2)
    assert isinstance(theirs, AuthenticationError)
    assert "has changed the address" in theirs.message
    assert "was told that this group is at" in ours.message


def test_frames_of_random_headers():
    """A rank that knows the secret and sends what no rank would is the one that is named."""
    assert set(hostile_peers.fuzzed_frames(5)) == {"rank 1 is named"}


def test_a_rank_that_is_far_away_beside_strangers():
    """A rank with a slow way is let in beside hundreds of strangers a second that are near."""
    assert hostile_peers.slow_peer(limit=15.0) < 10
