"""Opening the storage of a path or URL."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import known_implementations

from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.checkpoint.storage.remote import RemoteStorage
from ferrodist.errors import DistCheckpointError, describe_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.checkpoint.storage.base import Storage

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_URL_AS_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/[^/]")
_PASSWORD = re.compile(r"://[^/@:]*:[^/@]*@")
_LOCAL = ("file", "local")


def join_path(path: str, name: str) -> str:
    """Return the path or URL of an entry of a folder."""
    return f"{path.rstrip('/')}/{name}"


def parent_path(path: str) -> str:
    """Return the parent of a folder."""
    parent, _, name = path.rpartition("/")
    if not name or parent.endswith(":/"):
        raise ValueError(f"{path} has no parent folder for other checkpoints: save to a folder in it")
    return parent or "/"


def open_storage(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """Open the folder of a path, or of an fsspec URL (``s3://bucket/folder``) with options of its file system.

    TypeError or ValueError for an invalid path or unknown protocol; DistCheckpointError if the package for such URLs is
    not installed, or the file system can't be reached.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a checkpoint's path is text or a Path, not {type(path).__name__}")
    text = os.fspath(path)
    if not text:
        raise ValueError("a checkpoint's path is empty: name a folder")
    if (folded := _URL_AS_PATH.match(text)) and folded[1] in known_implementations:
        raise ValueError(
            f"{text!r} seems to be a URL that was made a Path, which drops a slash: give it as text with two (a local"
            " folder of this name by its full path)"
        )
    url = _URL.fullmatch(text)
    if "::" in text and "://" in text:
        raise ValueError(f"{text!r} is a chain of file systems, which may cache old contents: name only the last one")
    if url is not None and url[1].lower() not in _LOCAL:
        return _open_remote(text, url[1].lower(), options or {})
    if options:
        raise ValueError(f"storage_options are for URLs, and {text!r} is a local folder")
    if url is not None and not url[2]:
        raise ValueError(f"{text!r} names no folder")
    return LocalStorage(text if url is None else url[2])


def _open_remote(url: str, protocol: str, options: Mapping[str, Any]) -> RemoteStorage:
    if _PASSWORD.search(url):
        raise ValueError(
            f"{_PASSWORD.sub('://...@', url)!r} has a password in it, which messages would show: pass it in"
            " storage_options"
        )
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ValueError(
            f"{url!r}: fsspec knows no protocol {protocol!r}. Install the package that has it, or register it with"
            " fsspec.register_implementation; a local folder is named without ://"
        ) from None
    except ImportError as error:
        raise DistCheckpointError(
            f"{url!r} needs a package that is not installed ({error.__cause__ or error}). fsspec says: {error}"
        ) from error
    # Not fsspec's shared instance, which may answer from cached listings. Asynchronous ones keep connections and take
    # tenths of a second to make, so checkpoints share one without the cache.
    no_cache = {"use_listings_cache": False} if issubclass(kind, AsyncFileSystem) else {"skip_instance_cache": True}
    try:
        fs = kind(**{**kind._get_kwargs_from_urls(url), **options, **no_cache})
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{url!r} can't be opened with these storage_options: {describe_error(error)}") from error
    except Exception as error:  # some connect at once
        raise DistCheckpointError(f"{url!r} can't be opened: {describe_error(error)}") from error
    folder = kind._strip_protocol(url)
    if not folder.strip("/"):
        raise ValueError(f"{url!r} names no folder")
    return RemoteStorage(fs, folder, url.rstrip("/"))
