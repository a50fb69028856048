"""Variables of launchers, addresses and secrets."""

import pytest

from ferrodist.errors import InvalidRankError, InvalidWorldSizeError, RendezvousError
from ferrodist.rendezvous import make_secret, parse_address, read_environment, resolve_secret


def test_torchrun_variables():
    """Everything torchrun sets is read."""
    found = read_environment(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": "/logs/attempt_2/1/error.json",
        }
    )
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.group_rank, found.master_addr, found.master_port) == (1, "node0", 29500)
    assert (found.run_id, found.restart_count, found.agent_store) == ("run", 2, True)
    assert found.attempt_folder == "/logs/attempt_2"
    assert not found.single_host


def test_an_empty_environment():
    """Without a launcher all variables are None, which is not an error yet."""
    found = read_environment({"RANK": ""})
    assert found.rank is None
    assert found.restart_count == 0
    assert not found.agent_store
    assert not found.single_host


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["two", "1.5", "0x1", "²", "--5", "-", "5" * 50])
def test_variables_that_are_not_numbers(name, text):
    """The message names the variable, its text and what to do."""
    with pytest.raises(RendezvousError, match=rf"{name}='{text}'.*unset it"):
        read_environment({name: text})


def test_variables_that_do_not_fit():
    """Ranks outside their world, empty worlds and impossible ports are refused by name."""
    with pytest.raises(InvalidRankError, match=r"RANK=4 does not fit WORLD_SIZE=4"):
        read_environment({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(InvalidRankError, match=r"RANK=-1"):
        read_environment({"RANK": "-1"})
    with pytest.raises(InvalidRankError, match=r"LOCAL_RANK=2"):
        read_environment({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "1"})
    with pytest.raises(InvalidWorldSizeError, match=r"WORLD_SIZE=0"):
        read_environment({"WORLD_SIZE": "0"})
    with pytest.raises(RendezvousError, match=r"MASTER_PORT=70000"):
        read_environment({"MASTER_PORT": "70000"})
    with pytest.raises(RendezvousError, match=r"MASTER_PORT=-1"):
        read_environment({"MASTER_PORT": "-1"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a:1", ("a", 1)), ("[::1]:29500", ("::1", 29500)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_addresses(text, parts):
    """Names, IPv4 and bracketed IPv6 addresses are split."""
    assert parse_address(text) == parts


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:b", "a:-1", "a:65536", "::1", "::1:80", "a:1²"])
def test_invalid_addresses(text):
    """Invalid addresses raise with the text in the message."""
    with pytest.raises(ValueError, match=r"address|port") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_secrets(monkeypatch):
    """The argument wins over the environment, white space is dropped, and no two secrets are equal."""
    assert resolve_secret(None) == b""
    monkeypatch.setenv("FERRODIST_SECRET", "from-env\n")
    assert resolve_secret(None) == b"from-env"
    assert resolve_secret("given ") == b"given"
    assert resolve_secret(b"raw ") == b"raw "
    assert resolve_secret("") == b""
    assert len(make_secret()) >= 43
    assert make_secret() != make_secret()
