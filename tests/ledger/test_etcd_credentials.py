"""Who may use the ledger on etcd, and how those who may not are told: in one sentence, in time, without secrets."""

from __future__ import annotations

import base64
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, Tls
from holdfast.core.errors import ConfigError, LedgerError, LedgerRefused, LedgerUnavailable
from holdfast.ledger.etcd import check_url, open_etcd, survey
from holdfast.ledger.etcd.address import Address, parse_url, read_credentials
from holdfast.ledger.port import Change

from .contract import WAIT_S, collect, count
from .etcd_certificates import Authority
from .etcd_serving import EtcdFactory, administer, fresh_run, until

pytestmark = pytest.mark.xdist_group("etcd")

PASSWORD = "correct horse battery"
USER = {"HOLDFAST_LEDGER_USER": "trainer", "HOLDFAST_LEDGER_PASSWORD": PASSWORD}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls_member(etcd: str, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd that talks only to who has a certificate."""
    cert, key = authority.issue("member")
    tls = Tls(ca=authority.ca, cert=cert, key=key)
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), 1, tls=tls) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def certified(authority: Authority) -> dict[str, str]:
    cert, key = authority.issue("client")
    return {
        "HOLDFAST_LEDGER_CA": str(authority.ca),
        "HOLDFAST_LEDGER_CERT": str(cert),
        "HOLDFAST_LEDGER_KEY": str(key),
    }


@pytest.fixture(scope="module")
def guarded_member(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd with users: `trainer` may use all under /holdfast/, `guest` nothing."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        for user in ("root", "trainer", "guest"):
            administer(cluster, "/v3/auth/user/add", name=user, password=PASSWORD)
            administer(cluster, "/v3/auth/role/add", name=user)
            administer(cluster, "/v3/auth/user/grant", user=user, role=user)
        span = {"key": base64.b64encode(b"/holdfast/").decode(), "range_end": base64.b64encode(b"/holdfast0").decode()}
        administer(cluster, "/v3/auth/role/grant", name="trainer", perm={"permType": "READWRITE", **span})
        administer(cluster, "/v3/auth/enable")
        yield cluster


def refused(url: str, environ: Mapping[str, str], kind: type[LedgerError]) -> str:
    """What a call, a watch and a survey say, which is one sentence, within the deadline and without the password."""
    deadline_s = 1.0
    with closing(EtcdFactory(url, environ=environ).open(deadline_s=deadline_s)) as ledger:
        start = time.monotonic()
        with pytest.raises(kind) as call:
            ledger.put("a", b"")
        assert time.monotonic() - start < deadline_s + 1.5
        with closing(ledger.watch("", revision=1)) as watch, pytest.raises(kind) as following:
            watch.next(deadline_s)
        assert time.monotonic() - start < 2 * deadline_s + 3.0
    for error in (call.value, following.value):
        assert "\n" not in error.message and len(error.message) < 400
        assert PASSWORD not in f"{error!s} {error!r} {ledger!r}"
    return call.value.message


def uses(url: str, environ: Mapping[str, str]) -> None:
    """All kinds of calls."""
    with closing(EtcdFactory(url, environ=environ).open()) as ledger:
        lease = ledger.grant(5.0)
        revision = ledger.put("a", b"0", lease=lease)
        with closing(ledger.watch("", revision=revision)) as watch:
            second = ledger.compare_and_set("a", b"1", expected=revision)
            assert second is not None
            assert collect(watch, count(1)) == [Change("put", "a", b"1", second)]
            assert ledger.keep_alive(lease) >= 5.0
            ledger.revoke(lease)
            assert ledger.delete("a")
        assert ledger.read("").entries == ()


# -- certificates


def test_with_certificates_on_both_sides(tls_member: EtcdCluster, certified: dict[str, str]) -> None:
    assert tls_member.url.startswith("etcds://")
    uses(tls_member.url, certified)
    assert survey(tls_member.url, environ=certified).serves


def test_an_authority_that_did_not_sign_it(tls_member: EtcdCluster, certified: dict[str, str], tmp_path: Path) -> None:
    environ = {**certified, "HOLDFAST_LEDGER_CA": str(Authority(tmp_path).ca)}
    assert "its certificate is not trusted" in refused(tls_member.url, environ, LedgerRefused)
    with pytest.raises(LedgerRefused, match="that both sides trust"):
        survey(tls_member.url, environ=environ)


def test_a_host_that_the_certificate_does_not_name(tls_member: EtcdCluster, certified: dict[str, str]) -> None:
    url = tls_member.url.replace("127.0.0.1", "localhost")
    assert "that both sides trust" in refused(url, certified, LedgerRefused)


def test_without_a_certificate_of_ones_own(tls_member: EtcdCluster, authority: Authority) -> None:
    environ = {"HOLDFAST_LEDGER_CA": str(authority.ca)}
    assert "does it trust our certificate?" in refused(tls_member.url, environ, LedgerUnavailable)


def test_a_certificate_of_a_stranger(tls_member: EtcdCluster, certified: dict[str, str], tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("stranger")
    environ = {**certified, "HOLDFAST_LEDGER_CERT": str(cert), "HOLDFAST_LEDGER_KEY": str(key)}
    assert "does it trust our certificate?" in refused(tls_member.url, environ, LedgerUnavailable)


def test_tls_to_an_etcd_that_has_none(one_member: EtcdCluster, certified: dict[str, str]) -> None:
    url = one_member.url.replace("etcd://", "etcds://")
    assert "does it speak TLS?" in refused(url, certified, LedgerUnavailable)


def test_no_tls_to_an_etcd_that_wants_it(tls_member: EtcdCluster) -> None:
    url = tls_member.url.replace("etcds://", "etcd://")
    assert "does it want TLS?" in refused(url, {}, LedgerUnavailable)


# -- users


def test_with_user_and_password(guarded_member: EtcdCluster, tmp_path: Path) -> None:
    uses(guarded_member.url, USER)
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    uses(guarded_member.url, {"HOLDFAST_LEDGER_USER": "trainer", "HOLDFAST_LEDGER_PASSWORD_FILE": str(file)})


def test_a_wrong_password(guarded_member: EtcdCluster) -> None:
    environ = {**USER, "HOLDFAST_LEDGER_PASSWORD": "wrong"}
    assert "does not know this user and password" in refused(guarded_member.url, environ, LedgerRefused)
    with pytest.raises(LedgerRefused, match="does not know this user"):
        survey(guarded_member.url, environ=environ)


def test_no_user_where_one_is_wanted(guarded_member: EtcdCluster) -> None:
    assert "wants a user and a password" in refused(guarded_member.url, {}, LedgerRefused)


def test_a_user_who_may_not(guarded_member: EtcdCluster) -> None:
    environ = {**USER, "HOLDFAST_LEDGER_USER": "guest"}
    assert "does not let this user" in refused(guarded_member.url, environ, LedgerRefused)


def test_a_password_that_nobody_asks_for(one_member: EtcdCluster) -> None:
    uses(one_member.url, USER)


def test_a_member_that_forgot_the_token(guarded_member: EtcdCluster) -> None:
    """Tokens are not on etcd's disk. A client proves itself again, and its watch goes on."""
    with closing(EtcdFactory(guarded_member.url, environ=USER).open()) as ledger:
        revision = ledger.put("a", b"0")
        with closing(ledger.watch("", revision=revision)) as watch:
            assert watch.next(0.1) == ()
            guarded_member.kill(0)
            guarded_member.restart(0)
            second = ledger.put("a", b"1")

            def followed() -> bool:
                try:
                    return watch.next(1.0) == (Change("put", "a", b"1", second),)
                except LedgerUnavailable:
                    return False

            until(followed, "the watch goes on")


def test_secrets_are_in_no_log(guarded_member: EtcdCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    uses(guarded_member.url, USER)
    assert PASSWORD not in caplog.text
    credentials = read_credentials(parse_url("etcd://a"), USER)
    assert credentials.password == PASSWORD and PASSWORD not in repr(credentials)


# -- what is wrong before anything is sent


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "does not name a ledger"),
        ("a:2379", "does not name a ledger"),
        ("http://a:2379", "does not name a ledger"),
        ("etcd:a:2379", "does not name a ledger"),
        ("etcd://", "is not HOST or HOST:PORT"),
        ("etcd://a:0", "is not HOST or HOST:PORT"),
        ("etcd://a:65536", "is not HOST or HOST:PORT"),
        ("etcd://a:x", "is not HOST or HOST:PORT"),
        ("etcd://a,,b", "is not HOST or HOST:PORT"),
        ("etcd://a/path", "is not HOST or HOST:PORT"),
        ("etcd://::1:2379", "is not HOST or HOST:PORT"),
        ("etcd://[::1", "is not HOST or HOST:PORT"),
        ("etcd://a b", "is not HOST or HOST:PORT"),
        ("etcd://a:2379,a", "names an endpoint twice"),
        ("etcd://" + ",".join(f"h{n}" for n in range(65)), "names 65 endpoints"),
        ("etcd://me:hunter2@a:2379", "must not contain a user or password"),
        ("etcd://a:2379?password=hunter2", "must not contain a user or password"),
    ],
)
def test_urls_that_cannot_be(url: str, part: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_url(url, environ={})
    assert part in refusal.value.message
    assert refusal.value.hint and "\n" not in refusal.value.message
    assert "hunter2" not in str(refusal.value)


def test_urls_that_can() -> None:
    assert parse_url("etcd://a").addresses == (Address("a", 2379),)
    six = parse_url("etcds://[fd00::7]:23,b.example:24,[::1]/")
    assert six.tls and six.addresses == (Address("fd00::7", 23), Address("b.example", 24), Address("::1", 2379))
    assert [str(address) for address in six.addresses] == ["[fd00::7]:23", "b.example:24", "[::1]:2379"]


@pytest.mark.parametrize(
    ("url", "environ", "part"),
    [
        ("etcd://a", {"HOLDFAST_LEDGER_USER": "u"}, "HOLDFAST_LEDGER_PASSWORD_FILE is not"),
        ("etcd://a", {"HOLDFAST_LEDGER_PASSWORD": "hunter2"}, "HOLDFAST_LEDGER_USER is not"),
        ("etcd://a", {**USER, "HOLDFAST_LEDGER_PASSWORD_FILE": "x"}, "both HOLDFAST_LEDGER_PASSWORD and"),
        ("etcd://a", {"HOLDFAST_LEDGER_PASSWORD_FILE": "/nowhere"}, "cannot read /nowhere (No such file"),
        ("etcd://a", {"HOLDFAST_LEDGER_PASSWORD_FILE": "/dev/zero"}, "is larger than 65536 bytes"),
        ("etcd://a", {"HOLDFAST_LEDGER_CA": "x"}, "etcd:// is without TLS"),
        ("etcds://a", {"HOLDFAST_LEDGER_CA": "/nowhere"}, "cannot read /nowhere"),
        ("etcds://a", {"HOLDFAST_LEDGER_CA": __file__}, "does not name a file with certificates"),
        ("etcds://a", {"HOLDFAST_LEDGER_CERT": __file__}, "HOLDFAST_LEDGER_KEY is not"),
        (
            "etcds://a",
            {"HOLDFAST_LEDGER_CERT": __file__, "HOLDFAST_LEDGER_KEY": __file__},
            "are not a certificate and its key",
        ),
    ],
)
def test_environments_that_cannot_be(url: str, environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_etcd(url, "r", environ=environ)
    assert part in refusal.value.message
    assert refusal.value.hint and "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("run", ["", "a/b", "../up", "x" * 65, "é"])
def test_runs_that_cannot_be(run: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        open_etcd("etcd://a", run, environ={})


def test_nobody_there(etcd: str) -> None:
    """Names that do not resolve and ports where nobody listens: said at the deadline, with the reason for each."""
    with closing(open_etcd("etcd://127.0.0.1:9,nowhere.invalid:9", fresh_run(), deadline_s=1.0, environ={})) as ledger:
        start = time.monotonic()
        with pytest.raises(LedgerUnavailable, match=r"127\.0\.0\.1:9: connection refused") as error:
            ledger.get("a")
        assert 0.9 < time.monotonic() - start < WAIT_S / 2
        assert "nowhere.invalid:9: " in error.value.message


# -- what is loaded


def test_grpc_is_loaded_when_a_ledger_is_opened_and_not_before() -> None:
    code = (
        "import sys, holdfast.ledger.etcd as etcd\n"
        "etcd.check_url('etcd://a', environ={})\n"
        "assert 'grpc' not in sys.modules\n"
        "etcd.open_etcd('etcd://a', 'r', environ={}).close()\n"
        "assert 'grpc' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_grpc_it_is_said_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['grpc'] = None\n"
        "from holdfast.cli.main import main\n"
        "sys.exit(main(['ledger', 'runs', '--ledger', 'etcd://a']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "needs grpcio and protobuf, which are not installed" in done.stderr
    assert "hint: pip install 'holdfast[hosts]'" in done.stderr
