"""What hdfs-native says when something fails, in the terms of the error tree: who must act, and how.

The NameNode's errors arrive with the name of their Java class, and that is what decides.
"""

from __future__ import annotations

import re

from holdfast.core.errors import IntegrityError, NotStored, StorageError, StorageRefused, StorageUnavailable

_REFUSED = {
    "AccessControlException": "give that user the permission, or set HADOOP_USER_NAME to one who has it",
    "AuthorizationException": "the NameNode does not let this user in: set HADOOP_USER_NAME, or log in with kinit",
    "SASLError": "log in with kinit, or check hadoop.security.authentication in HADOOP_CONF_DIR",
    "GSSAPIError": "log in with kinit, or check hadoop.security.authentication in HADOOP_CONF_DIR",
    "NoSASLMechanism": "log in with kinit, or check hadoop.security.authentication in HADOOP_CONF_DIR",
    "InvalidToken": "the delegation token is no longer valid: get a new one",
    "ParentNotDirectoryException": "a part of that path is a file: choose another directory, or move that file away",
    "InvalidPathException": "HDFS does not take such a path: choose another directory",
    "UnsupportedFeature": "choose a directory that is replicated, neither encrypted nor erasure-coded",
}
_UNAVAILABLE = {
    "SafeModeException": "the NameNode leaves safe mode once its DataNodes have reported to it",
    "DSQuotaExceededException": "free some space there, or keep fewer checkpoints",
    "NSQuotaExceededException": "delete some files there, or keep fewer checkpoints",
    "QuotaByStorageTypeExceededException": "free some space there, or keep fewer checkpoints",
}
_NO_SUCH_HOST = ("Name or service not known", "No address associated", "nodename nor servname")
_NOT_A_DIRECTORY = ("is not a directory", "not a directory")
_BOTH_DIRECTORIES = "must both be directories"


def translated(error: BaseException, doing: str, authority: str) -> StorageError:
    kind, reason = reason_of(error)
    if isinstance(error, FileNotFoundError):
        return NotStored(f"cannot {doing}: it is not there")
    if kind == "ChecksumError":
        return IntegrityError(f"cannot {doing}: its bytes do not have the checksum they were written with")
    if isinstance(error, NotImplementedError):
        kind = "UnsupportedFeature"
    if any(words in reason for words in _NO_SUCH_HOST):
        return StorageRefused(f"cannot {doing}: there is no host {authority}", hint="check the host in the URI")
    if _BOTH_DIRECTORIES in reason:
        hint = "choose another directory, or move that one away"
        return StorageRefused(f"cannot {doing}: there is a directory of that name", hint=hint)
    if kind == "IllegalStateException" and any(words in reason for words in _NOT_A_DIRECTORY):
        kind = "ParentNotDirectoryException"
    if kind in _REFUSED:
        return StorageRefused(f"cannot {doing}: {reason}", hint=_REFUSED[kind])
    return StorageUnavailable(f"cannot {doing} at {authority}: {reason}", hint=_UNAVAILABLE.get(kind, ""))


def reason_of(error: BaseException) -> tuple[str, str]:
    """The kind of an error without its package, and the first line of what it says: the rest is Java's stack.

    The client writes errors as Rust shows them: RPCError("org.apache.hadoop.ipc.StandbyException", "text\\n\\tat …").
    """
    text = str(error)
    if match := re.match(r'(?:Fatal)?RPCError\("([^"]*)", "(.*)"\)', text, re.DOTALL):
        line = first_line(match[2].replace("\\n", "\n").replace('\\"', '"'))
        kind = match[1].rpartition(".")[2].rpartition("$")[2]
        return kind, line or kind
    if match := re.match(r'(\w+)(?:\("?(.*?)"?\))?$', text, re.DOTALL):
        return match[1], first_line(match[2] or match[1])
    return type(error).__name__, first_line(text) or type(error).__name__


def first_line(text: str) -> str:
    return text.partition("\n")[0].strip()
