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

    White space around a text secret is dropped, since files and shells add a line feed.

    Raises:
        TypeError: It is neither text nor bytes-like.
    """
    if secret is None:
        secret = os.environ.get(SECRET_VARIABLE, "")
    if isinstance(secret, str):
        return secret.strip().encode()
    if not isinstance(secret, (bytes, bytearray, memoryview)):  # bytes(5) would be five zeros
        raise TypeError(f"secret must be text or bytes, or None for FERRODIST_SECRET, not {type(secret).__name__}")
    return bytes(secret)
