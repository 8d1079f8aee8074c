"""A real S3 server that refuses, is overloaded, cut off, silent or killed: bounded time, a clear sentence, no harm."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint.storage import object_store
from holdfast.checkpoint.storage.object_store import ObjectStorage
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import NotStored, StorageError, StorageRefused, StorageUnavailable
from tests.harness import s3_server
from tests.harness.http_proxy import HttpProxy
from tests.harness.s3_server import S3Server

from .storage_contract import MIB, WAIT_S, aligned, filled, names, noise, write

pytestmark = [
    pytest.mark.skipif(bool(s3_server.why_not()), reason=s3_server.why_not() or "-"),
    pytest.mark.xdist_group("s3"),
]

GIVE_UP_S = 15.0  # a call gives up within about 10 s, and the machine is busy
LARGE = 20 * MIB  # three parts

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket("checkpoints")
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET_KEY)


@pytest.fixture
def proxy(server: S3Server) -> Iterator[HttpProxy]:
    with HttpProxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def storage(server: S3Server, proxy: HttpProxy) -> ObjectStorage:
    """With one committed part, reached through the proxy."""
    storage = ObjectStorage(server.uri(f"checkpoints/trouble-{next(_numbers)}", proxy.endpoint))
    write(storage, "old/part", noise(LARGE))
    return storage


def calls_of(storage: Storage) -> dict[str, Callable[[], object]]:
    return {
        "write few": lambda: write(storage, "new/few", b"x"),
        "write many": lambda: write(storage, "new/part", noise(LARGE, seed=1)),
        "overwrite": lambda: write(storage, "old/part", noise(LARGE, seed=1)),
        "create": lambda: storage.create("new/manifest.json", b"x"),
        "read": lambda: storage.read("old/part", LARGE),
        "read into": lambda: storage.read_into("old/part", aligned(LARGE)),
        "read nothing": lambda: storage.read_into("old/part", aligned(0)),
        "list": lambda: storage.list(),
        "delete": lambda: storage.delete("old/part"),
    }


def errors_of(storage: Storage) -> dict[str, StorageError]:
    """What each call raises, all made at once; none takes longer than it may."""

    def attempt(call: Callable[[], object]) -> StorageError:
        started = time.monotonic()
        with pytest.raises(StorageError) as caught:
            call()
        assert time.monotonic() - started < GIVE_UP_S
        return caught.value

    calls = calls_of(storage)
    with ThreadPoolExecutor(len(calls)) as threads:
        return dict(zip(calls, threads.map(attempt, calls.values()), strict=True))


def check_unharmed(storage: Storage) -> None:
    assert storage.list() == [Stored("old/part", LARGE)]
    assert storage.read("old/part", LARGE) == noise(LARGE)


def check_works(storage: Storage) -> None:
    for name, call in calls_of(storage).items():
        assert call() is not False, name
    assert names(storage.list()) == ["new/few", "new/manifest.json", "new/part"]
    assert storage.read("new/part", LARGE) == noise(LARGE, seed=1)


# -- refused


@pytest.mark.parametrize(
    "variable, code", [("SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("ACCESS_KEY_ID", "InvalidAccessKeyId")]
)
def test_wrong_credentials_are_refused(
    server: S3Server, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, variable: str, code: str
) -> None:
    monkeypatch.setenv(f"AWS_{variable}", "wrong")
    for name, error in errors_of(ObjectStorage(storage.uri)).items():
        assert isinstance(error, StorageRefused), name
        if name != "read nothing":  # asked without a body, and answered without one
            assert error.message.endswith(f"does not accept these credentials ({code})"), name
            assert "AWS_SECRET_ACCESS_KEY" in error.hint
        assert s3_server.SECRET_KEY not in str(error)
    check_unharmed(storage)


def test_a_bucket_that_does_not_exist_is_named(server: S3Server) -> None:
    errors = errors_of(ObjectStorage(server.uri("no-such-bucket/run")))
    del errors["read nothing"]  # a question without an answer's body: not even the store can say which is missing
    for name, error in errors.items():
        assert isinstance(error, StorageRefused), (name, error)
        assert error.message == f"there is no bucket no-such-bucket at {server.endpoint}", name
        assert "create it" in error.hint


def test_what_the_credentials_may_not_do_is_said(server: S3Server, proxy: HttpProxy, storage: ObjectStorage) -> None:
    proxy.trouble(answer=403, method="PUT")
    with pytest.raises(StorageRefused, match="these credentials are not allowed to") as caught:
        write(storage, "new", b"x")
    assert "checkpoints" in caught.value.hint


def test_no_credentials_at_all_are_noticed(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(StorageRefused, match="no credentials were found") as caught:
        ObjectStorage(server.uri("checkpoints/run")).list()
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


# -- overloaded, cut off, silent


def test_a_passing_overload_is_waited_out(proxy: HttpProxy, storage: ObjectStorage) -> None:
    proxy.trouble(answer=503, times=3)
    write(storage, "new", b"x")
    assert proxy.troubled == 3
    proxy.trouble(answer=503, times=3)
    storage.read_into("old/part", aligned(LARGE))
    assert names(storage.list()) == ["new", "old/part"]


@pytest.mark.parametrize("status", [500, 503])
def test_an_overload_that_lasts_is_reported_in_time(proxy: HttpProxy, storage: ObjectStorage, status: int) -> None:
    proxy.trouble(answer=status)
    for name, error in errors_of(storage).items():
        assert isinstance(error, StorageUnavailable), name
        assert str(status) in error.message, name
    proxy.heal()
    check_unharmed(storage)
    check_works(storage)


def test_silence_is_reported_in_time(proxy: HttpProxy, storage: ObjectStorage) -> None:
    proxy.trouble(stall=True)
    for name, error in errors_of(storage).items():
        assert isinstance(error, StorageUnavailable), name
        assert error.message.endswith(f": {proxy.endpoint} does not answer in time"), name
    proxy.heal()
    check_unharmed(storage)
    check_works(storage)


def test_requests_cut_in_the_middle(proxy: HttpProxy, storage: ObjectStorage) -> None:
    proxy.trouble(cut_request_at=100_000, method="PUT", times=1)
    write(storage, "once", noise(LARGE))
    assert proxy.troubled == 1
    assert storage.read("once", LARGE) == noise(LARGE)
    storage.delete("once")
    proxy.trouble(cut_request_at=100_000, method="PUT")
    for name in ("old/part", "new/part"):
        with pytest.raises(StorageUnavailable):
            write(storage, name, noise(LARGE, seed=1))
    assert storage.list() == [Stored("old/part", LARGE)]
    proxy.heal()
    check_unharmed(storage)
    check_works(storage)


def test_answers_cut_in_the_middle(proxy: HttpProxy, storage: ObjectStorage) -> None:
    memory = aligned(LARGE)
    proxy.trouble(cut_answer_at=1_000_000, method="GET", times=2)
    try:
        storage.read_into("old/part", memory)
    except StorageUnavailable:
        storage.read_into("old/part", memory)
    assert proxy.troubled == 2
    assert memory == noise(LARGE)
    proxy.trouble(cut_answer_at=1_000, method="GET")  # too little to arrive piece by piece
    for call in (lambda: storage.read("old/part", LARGE), lambda: storage.read_into("old/part", memory)):
        with pytest.raises(StorageUnavailable):
            call()
    proxy.heal()
    check_unharmed(storage)


def test_a_create_whose_answer_is_lost_is_not_taken_for_somebody_elses(
    proxy: HttpProxy, storage: ObjectStorage
) -> None:
    proxy.trouble(cut_answer_at=0, method="PUT")
    with pytest.raises(StorageUnavailable):
        storage.create("manifest.json", b"mine")
    assert proxy.troubled == 1
    proxy.heal()
    assert storage.read("manifest.json", 100) == b"mine"
    assert not storage.create("manifest.json", b"again")


def test_a_server_that_is_not_there(server: S3Server) -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    for name, error in errors_of(ObjectStorage(server.uri("checkpoints/run", endpoint))).items():
        assert isinstance(error, StorageUnavailable), name
        assert error.message.endswith(f": {endpoint} cannot be reached (Connection refused)"), name


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_clouds_that_are_not_there(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OTHER_CLOUDS[scheme].items():
        monkeypatch.setenv(name, value)
    storage = ObjectStorage(f"{scheme}://checkpoints/run?endpoint=http://127.0.0.1:{closed_port()}")
    for name, error in errors_of(storage).items():
        assert isinstance(error, StorageUnavailable), name
        assert f"{scheme}://checkpoints/run" in error.message


OTHER_CLOUDS = {
    "gs": {"GOOGLE_BEARER_TOKEN": "none"},  # or it would ask for one, beyond loopback
    "az": {"AZURE_STORAGE_ACCOUNT_NAME": "someone", "AZURE_SKIP_SIGNATURE": "true"},
}


# -- killed


def test_a_server_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server, HttpProxy(server.address) as proxy:
        server.make_bucket("checkpoints")
        storage = ObjectStorage(server.uri("checkpoints/run", proxy.endpoint))
        write(storage, "old/part", noise(LARGE))
        size = 64 * MIB
        data = filled(aligned(size), noise(size))
        before = proxy.body_bytes
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(storage.write, "new/part", data)
            deadline = time.monotonic() + WAIT_S
            while proxy.body_bytes - before < size // 4:
                assert time.monotonic() < deadline and not writing.done()
                time.sleep(0.005)
            server.kill()
            with pytest.raises(StorageUnavailable):
                writing.result(GIVE_UP_S)
        with pytest.raises(StorageUnavailable):
            storage.list()
        server.start()
        check_unharmed(storage)
        with pytest.raises(NotStored):
            storage.read("new/part", size)
        storage.write("new/part", data)
        assert storage.read("new/part", size) == data
        assert names(storage.list()) == ["new/part", "old/part"]


# -- the rest


def test_more_names_than_one_answer_holds(storage: ObjectStorage) -> None:
    expected = [f"many/{number:04}" for number in range(1050)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: write(storage, name, b"x"), expected))
    assert names(storage.list("many/")) == expected
    assert len(storage.list()) == 1051


def test_a_process_forked_too_late_is_told(storage: ObjectStorage) -> None:
    reader, writer = os.pipe()
    assert object_store._caller == os.getpid()
    child = os.fork()
    if child == 0:
        try:
            storage.list()
        except StorageRefused as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "forked after an object store had been used" in said.read()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
