"""From what a user wrote to a storage: a path, or a URI whose scheme says which kind it is.

Nothing is contacted here, and no client's package is imported before its scheme is asked for.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.checkpoint.storage.port import Storage
from holdfast.checkpoint.storage.spelling import POSSIBLE, check_spelling
from holdfast.core.errors import ConfigError

OBJECT_STORES = ("s3", "gs", "az")


def scheme_of(uri: str) -> str:
    """The scheme in lower case; empty for a plain path. A path may contain `://` after its first part."""
    scheme, separator, _ = uri.partition("://")
    return scheme.lower() if separator and "/" not in scheme else ""


def check_uri(uri: str) -> None:
    """Raise the ConfigError that opening it would, for what can be known without asking anybody."""
    open_storage(uri).close()


def open_storage(uri: str) -> Storage:
    """The storage at `uri`. ConfigError if it cannot be one; whether it answers shows at the first call."""
    if not uri or "\0" in uri or uri.startswith("://"):
        raise ConfigError(f"{uri!r} is no place for checkpoints", hint=f"possible are {POSSIBLE}")
    check_spelling(uri)
    scheme = scheme_of(uri)
    if scheme in ("", "file"):
        from holdfast.checkpoint.storage.local import LocalStorage

        return LocalStorage(_path_of(uri) if scheme else Path(uri).expanduser(), uri=uri)
    if scheme in OBJECT_STORES:
        from holdfast.checkpoint.storage.object_store import ObjectStorage

        return ObjectStorage(uri)
    if scheme == "hdfs":
        from holdfast.checkpoint.storage.hdfs import HdfsStorage

        return HdfsStorage(uri)
    raise ConfigError(f"checkpoints cannot be kept at {scheme}://", hint=f"possible are {POSSIBLE}")


def check_there(uri: str) -> None:
    """ConfigError if a directory of this host is not there, or is a file. Object stores know no directories."""
    if scheme_of(uri) not in ("", "file"):
        return
    path = _path_of(uri) if scheme_of(uri) else Path(uri).expanduser()
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return
    except FileNotFoundError:
        raise ConfigError(f"there is no directory {path}", hint="check the path, or give the name of a run") from None
    except (OSError, ValueError) as error:
        said = f"{path} cannot be looked into: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(said, hint="check the path and its permissions") from error
    raise ConfigError(f"{path} is a file", hint="name the directory that the checkpoints are in")


def _path_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise ConfigError(f"{uri} does not name a directory of this host", hint="write file:///the/directory")
    path = os.fsdecode(unquote(parts.path, errors="surrogateescape"))
    if "\0" in path:
        raise ConfigError(f"{uri} does not name a directory", hint="write file:///the/directory")
    return Path(path)
