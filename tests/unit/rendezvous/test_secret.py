"""The job secret: what it may be given as."""

import pytest

from ferrodist.rendezvous import resolve_secret


@pytest.mark.parametrize("secret", [5, True, 1.5, ["s"], [1, 2]])
def test_a_secret_is_text_or_bytes(secret):
    """What bytes() would turn into something to guess, or into some other error, is a TypeError."""
    with pytest.raises(TypeError, match=r"secret must be text or bytes"):
        resolve_secret(secret)


@pytest.mark.parametrize("secret", [b"s", bytearray(b"s"), memoryview(b"s"), "s", " s\n"])
def test_text_and_bytes_are_one_secret(secret):
    """Every form gives the same bytes, and text loses the white space around it."""
    assert resolve_secret(secret) == b"s"
