"""The job secret: what a process must know to be taken for a rank of the job."""

from __future__ import annotations

import os
import secrets

__all__ = ["SECRET_VARIABLE", "make_secret", "resolve_secret"]

SECRET_VARIABLE = "FERRODIST_SECRET"  # noqa: S105 - the name of a variable, not a secret


def make_secret() -> str:
    """Return a new secret of 256 random bits as text that is safe in an environment variable."""
    return secrets.token_urlsafe(32)


def resolve_secret(secret: str | bytes | None) -> bytes:
    """Return the secret as bytes: the argument, else the environment's FERRODIST_SECRET, else ``b""``.

    White space around a text secret is dropped, since files and shells add a line feed. ``b""`` stands for none: then
    processes prove to each other that they know their user's secret (`user_secret`).

    Raises:
        TypeError: It is neither text nor bytes-like.
        ValueError: It has white space alone.
    """
    source = "secret"
    if secret is None:
        secret, source = os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    if isinstance(secret, str):
        # Bytes of the environment that are not UTF-8 are surrogates here.
        given, found = bool(secret), secret.strip().encode("utf-8", "surrogatepass")
    elif isinstance(secret, (bytes, bytearray, memoryview)):  # bytes(5) would be five zeros
        given, found = len(secret) > 0, bytes(secret)
    else:
        raise TypeError(f"secret must be text or bytes, or None for FERRODIST_SECRET, not {type(secret).__name__}")
    if given and not found.strip():
        raise ValueError(
            f"{source} is white space, which anybody can guess: give it a value (`python -m ferrodist secret` prints a"
            " new one), or none at all"
        )
    return found
