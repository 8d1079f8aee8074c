"""Where checkpoints live: a local directory, an object store, HDFS. All behind one port, with one contract suite."""

from holdfast.checkpoint.storage.opening import check_uri, open_storage
from holdfast.checkpoint.storage.port import Storage, Stored

__all__ = ["Storage", "Stored", "check_uri", "open_storage"]
