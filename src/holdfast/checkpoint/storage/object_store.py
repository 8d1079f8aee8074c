"""Storage in an object store: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage. Through obstore.

Credentials come from the environment, as the store's own tools read them (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_
CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, …); a URI may add `?endpoint=`, `region=` and `timeout_s=`, never a secret.

A put is atomic there, also one of many parts; parts that a dead writer has sent are never shown, and go when the
bucket's lifecycle rule for incomplete uploads says so. A request gives up after `timeout_s` and is tried again for
about as long, so that a call returns seconds after its store stopped answering. A link must carry what is under way
at once (48 MiB for two writers) in that time: give a slow one a longer `timeout_s`.

obstore runs threads of its own, which a fork does not take along: a process forked from one that has made a call
cannot make any, and is told so.
"""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.checkpoint.storage.names import check_name, check_prefix, is_name
from holdfast.checkpoint.storage.object_errors import BucketAddress, is_conflict, translated
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError, IntegrityError, NotStored, StorageRefused, StorageUnavailable

PART_BYTES = 8 << 20
PARTS_MAX = 9_000  # stores take 10,000
AT_ONCE = 3  # parts of one object under way
TIMEOUT_S = 5.0
TIMEOUT_S_MAX = 300.0

_OPTIONS = ("endpoint", "region", "timeout_s")
_SECRET = re.compile(r"key|secret|token|password|credential|sas|sig", re.IGNORECASE)
_PREFIX = re.compile(r"[\w.=+@,:! -]+(/[\w.=+@,:! -]+)*")
_caller: int | None = None  # the process that has made a call


class ObjectStorage:
    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.writers = 2
        self.block_bytes = 8 << 20
        self._place, options = _parse(uri)
        self._obstore = _imported()
        timeout_s = _timeout_of(options)
        self._store = _opened(self._obstore, self._place, options, timeout_s, retries=10)
        # Tried again, a create whose answer was lost would find itself and say that somebody else has won.
        self._store_once = _opened(self._obstore, self._place, options, timeout_s, retries=0)

    def write(self, name: str, data: memoryview) -> None:
        part_bytes = max(PART_BYTES, -(-len(data) // PARTS_MAX))
        with self._named("write", name):
            self._obstore.put(
                self._store,
                name,
                data,
                chunk_size=part_bytes,
                max_concurrency=AT_ONCE,
                use_multipart=len(data) > part_bytes,
            )

    def create(self, name: str, data: bytes) -> bool:
        with self._named("create", name):
            try:
                self._obstore.put(self._store_once, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as error:
                if is_conflict(error):  # another one is at it, and may yet fail
                    raise StorageUnavailable(f"somebody else is creating {self._place.of(name)}") from error
                return False
        return True

    def read(self, name: str, bytes_max: int) -> bytes:
        with self._named("read", name):
            result = self._obstore.get(self._store, name)
            size: int = result.meta["size"]
            if size > bytes_max:
                raise IntegrityError(f"{self._place.of(name)} has {size} bytes, more than the {bytes_max} it may have")
            if size <= PART_BYTES:
                return bytes(self._whole(result.bytes(), name, size))
            del result
        content = bytearray(size)
        self.read_into(name, memoryview(content))
        return bytes(content)

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        end = offset + len(memory)
        with self._named("read", name):
            if not len(memory):
                self._check_end(name, self._obstore.head(self._store, name)["size"], end)
                return
            first = self._obstore.get(self._store, name, options={"range": (offset, min(end, offset + PART_BYTES))})
            self._check_end(name, first.meta["size"], end)
            same = {"if_match": first.meta["e_tag"]} if first.meta["e_tag"] else {}

            def fetch(start: int) -> None:
                stop = min(start + PART_BYTES, end)
                result = first
                if start != offset:
                    result = self._obstore.get(self._store, name, options={"range": (start, stop), **same})
                memory[start - offset : stop - offset] = self._whole(result.bytes(), name, stop - start)

            starts = range(offset, end, PART_BYTES)
            if len(starts) == 1:
                fetch(offset)
                return
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="holdfast-fetch") as threads:
                fetches = [threads.submit(fetch, start) for start in starts]
                try:
                    for each in fetches:
                        each.result()
                finally:
                    for each in fetches:
                        each.cancel()

    def list(self, prefix: str = "") -> builtins.list[Stored]:
        check_prefix(prefix)
        found: builtins.list[Stored] = []
        with self._named("list", prefix, check=False):
            # Stores take whole parts of a name only, so the last one is looked for here.
            for batch in self._obstore.list(self._store, prefix.rpartition("/")[0] or None):
                found += [Stored(one["path"], one["size"]) for one in batch if one["path"].startswith(prefix)]
        return sorted((one for one in found if is_name(one.name)), key=lambda stored: stored.name)

    def delete(self, name: str) -> None:
        with self._named("delete", name):
            try:
                self._obstore.delete(self._store, name)
            except FileNotFoundError as error:
                if not isinstance(translated(error, self._place, "delete", name), NotStored):
                    raise

    def close(self) -> None:
        pass

    def _check_end(self, name: str, size: int, end: int) -> None:
        if size < end:
            raise IntegrityError(f"{self._place.of(name)} has {size} bytes, fewer than the {end} it must have")

    def _whole(self, content: Any, name: str, size: int) -> Any:
        if len(content) != size:
            raise StorageUnavailable(f"only {len(content)} of {size} bytes of {self._place.of(name)} arrived")
        return content

    @contextmanager
    def _named(self, doing: str, name: str, *, check: bool = True) -> Iterator[None]:
        """Check the name, and turn the client's errors into ours."""
        global _caller
        if check:
            check_name(name)
        if _caller is None:
            _caller = os.getpid()
        elif _caller != os.getpid():
            raise StorageRefused(
                f"cannot {doing} {self._place.of(name)}: this process was forked after an object store had been used",
                hint="start the process anew (spawn) instead of forking it, or fork before the first call",
            )
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            ours = translated(error, self._place, doing, name)
            if isinstance(ours, StorageRefused) and self._bucket_is_missing(ours):
                ours = self._place.missing()
            raise ours from error

    def _bucket_is_missing(self, refused: StorageRefused) -> bool:
        """Some stores deny what they do not have. Listing tells the two apart."""
        if "not allowed" not in refused.message:
            return False
        try:
            next(iter(self._obstore.list(self._store_once, chunk_size=1)), None)
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            return str(translated(error, self._place, "list", "")) == str(self._place.missing())
        return False


def _parse(uri: str) -> tuple[BucketAddress, dict[str, str]]:
    parts = urlsplit(uri)
    scheme, kind = parts.scheme.lower(), "container" if parts.scheme.lower() == "az" else "bucket"
    written = f"{scheme}://{kind}/prefix"
    if "@" in parts.netloc:
        raise ConfigError(f"a {scheme}:// URI holds no user or password", hint=_hint(scheme, written))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc):
        raise ConfigError(f"{uri} names no {kind}", hint=f"write {written}")
    prefix = unquote(parts.path).strip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise ConfigError(
            f"{prefix!r} cannot be a prefix of names", hint=f"write {written}, of letters, digits, - and _"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in options:
        if key not in _OPTIONS and _SECRET.search(key):
            raise ConfigError(
                f"a {scheme}:// URI holds no secrets, but this one has {key}=", hint=_hint(scheme, written)
            )
        if key not in _OPTIONS or (key == "region" and scheme != "s3"):
            possible = ", ".join(one for one in _OPTIONS if scheme == "s3" or one != "region")
            raise ConfigError(f"a {scheme}:// URI has no option {key}", hint=f"possible are {possible}")
    if parts.fragment:
        raise ConfigError(f"{uri} has a # in it", hint=f"write {written}")
    endpoint = options.get("endpoint")
    if endpoint is not None and not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", endpoint):
        raise ConfigError(
            f"the endpoint in this {scheme}:// URI is no address", hint="write endpoint=https://host:port"
        )
    return BucketAddress(scheme, parts.netloc, prefix, endpoint or ""), options


def _hint(scheme: str, written: str) -> str:
    variables = {
        "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS",
        "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    }
    return f"set {variables[scheme]} in the environment and write {written}"


def _timeout_of(options: dict[str, str]) -> float:
    written = options.get("timeout_s")
    try:
        timeout_s = TIMEOUT_S if written is None else float(written)
    except ValueError:
        timeout_s = 0.0
    if not 0.1 <= timeout_s <= TIMEOUT_S_MAX:
        raise ConfigError(f"timeout_s={written} is not possible", hint=f"from 0.1 to {TIMEOUT_S_MAX:g} seconds")
    return timeout_s


def _imported() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise ConfigError(
            "checkpoints in an object store need the package obstore", hint="pip install 'holdfast[s3]'"
        ) from None
    return obstore


def _opened(obstore: Any, place: BucketAddress, options: dict[str, str], timeout_s: float, *, retries: int) -> Any:
    kind = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}[place.scheme]
    config = {"region": options["region"]} if "region" in options else {}
    if place.endpoint:
        config["base_url" if place.scheme == "gs" else "endpoint"] = place.endpoint
    seconds = timedelta(seconds=timeout_s)
    try:
        return kind(
            place.bucket,
            prefix=place.prefix or None,
            config=config,
            # HTTP is used only where the endpoint is written that way.
            client_options={"allow_http": True, "timeout": seconds, "connect_timeout": seconds / 2},
            retry_config={
                "max_retries": retries,
                "retry_timeout": seconds,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{place} cannot be used: {reason}", hint=_hint(place.scheme, str(place))) from error
