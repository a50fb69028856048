"""The job secret: what a process must know to be taken for a rank of the job.

The secret of a user on a host: what processes prove to each other where no job secret was given.

It lies in a file that only this user can read, in a folder that only this user can use. The place depends on nothing
but the user, so that processes from different shells, with different variables, find the same one.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


_BASES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder made there is checked for its owner and mode
_FILE = "secret"
_FEWEST_BYTES, _MOST_BYTES = 32, 1024
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def secret_or_users(secret: bytes) -> bytes:
    """Return the job secret, or this user's secret where none was given."""
    return secret or user_secret()


def user_secret() -> bytes:
    """Return the secret that the processes of this user share on this host, making it where there is none.

    Raises:
        AuthenticationError: None of the folders for it can be used.
    """
    folders = _folders()
    problems: list[str] = []
    for folder in folders:  # one that is there counts before one that could be made in an earlier folder
        with contextlib.suppress(OSError):
            return _secret_in(folder, may_create=False)
    for folder in folders:
        with _noting(problems, folder):
            return _secret_in(folder, may_create=True)
    raise AuthenticationError(
        "no FERRODIST_SECRET is set, and the secret that processes of one user share without it can't be kept in any"
        f" of its places ({'; '.join(problems)}). Set FERRODIST_SECRET to the same value on every rank (`python -m"
        " ferrodist secret` prints a new one)."
    )


@contextlib.contextmanager
def _noting(problems: list[str], folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(f"{folder}: {error.strerror or error}")


def _folders() -> list[Path]:
    user = os.geteuid()
    folders = [Path(base, f"ferrodist-{user}") for base in _BASES]
    with contextlib.suppress(KeyError):  # a user without an entry, as in containers
        folders.append(Path(pwd.getpwuid(user).pw_dir, ".ferrodist"))
    return folders


def _secret_in(folder: Path, *, may_create: bool) -> bytes:
    """Return the secret in a folder; OSError where there is none, or where others could have put or read it."""
    if may_create:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    descriptor = os.open(folder, _OPEN | os.O_DIRECTORY)
    try:
        _check_private(os.fstat(descriptor))
        if may_create:
            _create_in(descriptor)
        return _read_in(descriptor)
    finally:
        os.close(descriptor)


def _create_in(folder: int) -> None:
    """Make the file, whole from the first moment that it has its name; one that is there stays."""
    draft = f".{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(make_secret().encode())
        with contextlib.suppress(FileExistsError):
            os.link(draft, _FILE, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(draft, dir_fd=folder)


def _read_in(folder: int) -> bytes:
    descriptor = os.open(_FILE, _OPEN | os.O_NONBLOCK, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"its {_FILE!r} is no regular file: remove it")
        _check_private(status)
        data = os.read(descriptor, _MOST_BYTES)
        if len(data) < _FEWEST_BYTES:
            raise OSError(f"its {_FILE!r} has {len(data)} bytes, which are too few: remove it")
        for used in (folder, descriptor):  # so that what cleans up old files of /tmp leaves it
            with contextlib.suppress(OSError):
                os.utime(used)
        return data
    finally:
        os.close(descriptor)


def _check_private(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {status.st_uid}")
    if status.st_mode & 0o077:
        raise OSError(f"other users may use it (mode {stat.S_IMODE(status.st_mode):o}): remove it, or chmod go-rwx")
