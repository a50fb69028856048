"""The job secret: what it may be given as."""

import dataclasses
import importlib
import os
import pkgutil

import msgspec
import pytest

import ferrodist
from ferrodist.launch.spec import LaunchSpec, ProgramKind
from ferrodist.rendezvous import resolve_secret, shared_store


@pytest.mark.parametrize("secret", [5, True, 1.5, ["s"], [1, 2]])
def test_a_secret_is_text_or_bytes(secret):
    """Values that bytes() would turn into something guessable, or another error, are a TypeError."""
    with pytest.raises(TypeError, match=r"secret must be text or bytes"):
        resolve_secret(secret)


@pytest.mark.parametrize("secret", [b"s", bytearray(b"s"), memoryview(b"s"), "s", " s\n"])
def test_text_and_bytes_are_one_secret(secret):
    """Every form gives the same bytes, and text loses the white space around it."""
    assert resolve_secret(secret) == b"s"


@pytest.mark.parametrize("secret", [" ", "\n\t ", b" ", bytearray(b" \n")])
def test_white_space_is_refused_as_a_secret(secret, monkeypatch):
    """A guessable secret is refused by name, as argument and as variable, and never treated as a missing one."""
    with pytest.raises(ValueError, match=r"^secret is white space"):
        resolve_secret(secret)
    if isinstance(secret, str):
        monkeypatch.setenv("FERRODIST_SECRET", secret)
        with pytest.raises(ValueError, match=r"^FERRODIST_SECRET is white space"):
            resolve_secret(None)
        with pytest.raises(ValueError, match=r"^FERRODIST_SECRET is white space"):
            LaunchSpec(program="pkg", kind=ProgramKind.MODULE)
        with pytest.raises(ValueError, match=r"^secret is white space"):
            LaunchSpec(program="pkg", kind=ProgramKind.MODULE, secret=secret)


def test_secrets_that_are_not_utf_8(monkeypatch):
    """Bytes of the environment that are not UTF-8 are a valid secret."""
    monkeypatch.setenv("FERRODIST_SECRET", os.fsdecode(b"\xff\xfe"))
    assert resolve_secret(None) == resolve_secret(os.fsdecode(b"\xff\xfe")) != b""


def _all_classes():
    for module in pkgutil.walk_packages(ferrodist.__path__, "ferrodist."):
        if module.name.endswith("__main__"):
            continue
        try:
            found = importlib.import_module(module.name)
        except ImportError:  # of what is not installed here
            continue
        for kind in vars(found).values():
            if isinstance(kind, type) and kind.__module__ == module.name:
                yield kind


def _holds_secret(name, annotation):
    words = name.strip("_").split("_")
    return bool({"secret", "password", "credentials"} & set(words)) or (
        words[-1] == "key" and "bytes" in str(annotation)
    )


def test_no_repr_shows_a_secret():
    """Every class with a secret among its fields leaves it out of its repr: tracebacks and logs print those."""
    found = set()
    for kind in _all_classes():
        if dataclasses.is_dataclass(kind):
            for entry in dataclasses.fields(kind):
                if _holds_secret(entry.name, entry.type):
                    found.add(kind.__name__)
                    assert not entry.repr, f"{kind.__qualname__}.{entry.name} needs field(repr=False)"
        elif issubclass(kind, (msgspec.Struct, tuple)) and any(
            _holds_secret(*entry) for entry in getattr(kind, "__annotations__", {}).items()
        ):
            found.add(kind.__name__)
            assert "__repr__" in vars(kind), f"{kind.__qualname__} needs a repr without the secret"
    assert found >= {
        "HostTopology",
        "Attempt",
        "JoinRequest",
        "Membership",
        "_JobInfo",
        "LaunchSpec",
    }


def test_reprs_of_the_secrets_owners_do_not_show_it():
    """The hand-written repr of the job's description does not show its secret."""
    charter = shared_store._JobInfo(job="j", world_size=2, made_secret=b"do-not-show", nonce=b"", proof=b"")
    assert "do-not-show" not in repr(charter)
