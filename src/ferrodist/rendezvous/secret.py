"""The job secret, which authenticates the ranks of a job, and the user secret, which replaces it on one host.

The user secret is in a file that only this user can read, in a folder that only this user can use. Its path depends on
nothing but the user, so that processes from different shells, with different variables, find the same one.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from pathlib import Path

from ferrodist.errors import AuthenticationError

SECRET_VARIABLE = "FERRODIST_SECRET"  # noqa: S105 - the name of a variable, not a secret


def make_secret() -> str:
    """Return a new secret of 256 random bits as text that is safe in an environment variable."""
    return secrets.token_urlsafe(32)


def resolve_secret(secret: str | bytes | None) -> bytes:
    """Return the secret as bytes: the argument, else the environment's FERRODIST_SECRET, else ``b""``.

    White space around a text secret is stripped, since files and shells add a newline. ``b""`` means no secret:
    processes then prove to each other that they know their user's secret (`user_secret`).

    Raises:
        TypeError: The secret is neither text nor bytes-like.
        ValueError: The secret is only white space.
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


_PARENT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the folder made there is checked for its owner and mode
_FILE = "secret"
_MIN_BYTES, _MAX_BYTES = 32, 1024
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def user_secret() -> bytes:
    """Return the secret that the processes of this user share on this host, creating it if necessary."""
    folders = _folders()
    problems: list[str] = []
    for folder in folders:  # an existing secret takes precedence over a new one in an earlier folder
        with contextlib.suppress(OSError):
            return _read_or_create(folder, may_create=False)
    for folder in folders:
        try:
            return _read_or_create(folder, may_create=True)
        except OSError as error:  # noqa: PERF203 - of a few folders
            problems.append(f"{folder}: {error.strerror or error}")
    raise AuthenticationError(
        "no FERRODIST_SECRET is set, and the secret that processes of one user share without it can't be kept in any"
        f" of its places ({'; '.join(problems)}). Set FERRODIST_SECRET to the same value on every rank (`python -m"
        " ferrodist secret` prints a new one)."
    )


def _folders() -> list[Path]:
    user = os.geteuid()
    folders = [Path(base, f"ferrodist-{user}") for base in _PARENT_FOLDERS]
    with contextlib.suppress(KeyError):  # a user without an entry, as in containers
        folders.append(Path(pwd.getpwuid(user).pw_dir, ".ferrodist"))
    return folders


def _read_or_create(folder: Path, *, may_create: bool) -> bytes:
    """Return the secret in a folder; OSError if it is missing, or other users could read or replace it."""
    if may_create:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    descriptor = os.open(folder, _OPEN | os.O_DIRECTORY)
    try:
        _check_private(os.fstat(descriptor))
        if may_create:
            _create_secret(descriptor)
        return _read_secret(descriptor)
    finally:
        os.close(descriptor)


def _create_secret(folder: int) -> None:
    """Create the file atomically with its contents; an existing one stays."""
    temporary = f".{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(make_secret().encode())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, _FILE, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(temporary, dir_fd=folder)


def _read_secret(folder: int) -> bytes:
    descriptor = os.open(_FILE, _OPEN | os.O_NONBLOCK, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"its {_FILE!r} is no regular file: remove it")
        _check_private(status)
        data = os.read(descriptor, _MAX_BYTES)
        if len(data) < _MIN_BYTES:
            raise OSError(f"its {_FILE!r} has {len(data)} bytes, which are too few: remove it")
        for used in (folder, descriptor):  # so that cleaners of /tmp keep it
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
