"""A real HDFS on this machine, for tests and drills: a NameNode and DataNodes, which can be killed and started again.

    with HdfsCluster(directory) as cluster:
        storage = HdfsStorage(f"{cluster.uri}/checkpoints")
        cluster.kill_datanode()
        cluster.start_datanode()    # with what it held

Everything listens on loopback and keeps its data in `directory`. The jars are those that scripts/install_hadoop.sh
fetches, or those in $HOLDFAST_HADOOP. No replication: with its one DataNode gone, a block cannot be read.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape

JARS = "HOLDFAST_HADOOP"
START_S = 60.0
_CHECKOUT_JARS = Path(".tools", "hadoop", "jars")  # where scripts/install_hadoop.sh puts them
_END_S = 10.0
_ASK_S = 5.0
_POLL_S = 0.05
_PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections: free stays free
# One core's worth of compiler and the smallest collector: these processes live for seconds.
_JAVA_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_LOG4J = """log4j.rootLogger=INFO,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""
BLOCK_BYTES = 16 << 20  # of a file's blocks; small, so that a write of a test has several


def why_not() -> str:
    """Why HDFS cannot be started here; empty if it can."""
    if not _java():
        return "there is no java (Debian: openjdk-17-jre-headless)"
    if not list(_jars().glob("hadoop-hdfs-*.jar")):
        return f"there are no jars of Hadoop in {_jars()} (scripts/install_hadoop.sh fetches them)"
    return ""


class HdfsCluster:
    """Its processes die with the thread that started them. One thread at a time."""

    def __init__(self, directory: Path, datanodes: int = 1) -> None:
        self.directory = directory.resolve()
        self._namenode = _Daemon(self.directory / "namenode")
        self._rpc_port, self._namenode.web_port = _free_ports(2)
        self._datanodes = [_Daemon(self.directory / f"datanode{number}") for number in range(datanodes)]

    @property
    def uri(self) -> str:
        return f"hdfs://127.0.0.1:{self._rpc_port}"

    # -- all of it

    def start(self) -> None:
        """Format it, start all, wait until it takes writes."""
        self._configure(self._namenode, self._namenode_settings())
        try:
            self._namenode.start(_NAMENODE, "-format", "-nonInteractive")
            self._namenode.wait_ended(START_S)
            self.start_namenode()
            for number in range(len(self._datanodes)):
                self._launch_datanode(number)
            for number in range(len(self._datanodes)):
                self._wait_for(lambda n=number: self._registered(n), self._datanodes[number])  # type: ignore[misc]
            self.wait_writable()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes. Nothing of theirs is needed afterwards, so none is asked politely."""
        for daemon in (*self._datanodes, self._namenode):
            daemon.kill()

    def __enter__(self) -> HdfsCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_writable(self) -> None:
        """Wait until the NameNode is out of safe mode. It enters that when it starts, until blocks are reported."""
        self._wait_for(lambda: self._state().get("FSState") == "Operational", self._namenode)

    def heal(self) -> None:
        """Start whoever does not run, let go on whoever was stopped, and wait until it takes writes."""
        for daemon in (self._namenode, *self._datanodes):
            daemon.signal(signal.SIGCONT)
        if not self._namenode.alive:
            self.start_namenode()
        for number, daemon in enumerate(self._datanodes):
            if not daemon.alive:
                self._launch_datanode(number)
            self._wait_for(lambda number=number: self._registered(number), daemon)  # type: ignore[misc]
        self.wait_writable()

    # -- one process

    def kill_namenode(self) -> None:
        """SIGKILL. Its data stays."""
        self._namenode.kill()

    def start_namenode(self) -> None:
        """Start it and wait until it answers; it may be in safe mode until DataNodes have reported to it."""
        self._namenode.start(_NAMENODE)
        self._wait_for(lambda: bool(self._state()), self._namenode)

    def freeze_namenode(self) -> None:
        """SIGSTOP: connections to it open, and nobody answers."""
        self._namenode.signal(signal.SIGSTOP)

    def thaw_namenode(self) -> None:
        self._namenode.signal(signal.SIGCONT)

    def kill_datanode(self, number: int = 0) -> None:
        """SIGKILL. Its blocks stay."""
        self._datanodes[number].kill()

    def start_datanode(self, number: int = 0) -> None:
        """Start one that was killed, with its blocks; wait until the NameNode takes it for a member again."""
        self._launch_datanode(number)
        self._wait_for(lambda: self._registered(number), self._datanodes[number])
        self.wait_writable()

    def freeze_datanode(self, number: int = 0) -> None:
        self._datanodes[number].signal(signal.SIGSTOP)

    def thaw_datanode(self, number: int = 0) -> None:
        self._datanodes[number].signal(signal.SIGCONT)

    # -- questions

    def live_datanodes(self) -> list[str]:
        """Address of each DataNode that the NameNode counts on. It takes up to 15 s to miss a dead one."""
        nodes = json.loads(self._namenode.bean("NameNode", "NameNodeInfo").get("LiveNodes", "{}"))
        return [node["xferaddr"] for node in nodes.values()]

    def being_written(self, number: int = 0) -> int:
        """Bytes of blocks that this DataNode is receiving now."""
        sizes = []
        for path in (self._datanodes[number].directory / "data").glob("current/*/current/rbw/blk_*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # finished meanwhile
                pass
        return sum(sizes)

    def flushes(self, number: int = 0) -> int:
        """How often this DataNode has flushed a block to its disk since it started, as of a second ago or two."""
        return int(self._datanodes[number].bean("DataNode", "DataNodeActivity*")["FsyncCount"])

    def _registered(self, number: int) -> bool:
        return self._datanodes[number].address in self.live_datanodes()

    def _state(self) -> dict[str, Any]:
        return self._namenode.bean("NameNode", "FSNamesystemState")

    def _wait_for(self, condition: Callable[[], bool], daemon: _Daemon) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if not daemon.alive:
                raise RuntimeError(f"{daemon.directory.name} ended: {daemon.last_words()}")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{daemon.directory.name} is not ready after {START_S:g} s: {daemon.last_words()}")
            time.sleep(_POLL_S)

    # -- inside

    def _launch_datanode(self, number: int) -> None:
        """On ports of its own each time: its address in the NameNode's list then says that this start registered."""
        daemon = self._datanodes[number]
        data, daemon.web_port, ipc = _free_ports(3)
        daemon.address = f"127.0.0.1:{data}"
        settings = {
            **self._shared_settings(),
            "dfs.datanode.data.dir": f"file://{daemon.directory}/data",
            "dfs.datanode.address": daemon.address,
            "dfs.datanode.http.address": f"127.0.0.1:{daemon.web_port}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
        }
        self._configure(daemon, settings)
        daemon.start(_DATANODE)

    def _shared_settings(self) -> dict[str, str]:
        return {
            "fs.defaultFS": self.uri,
            "hadoop.tmp.dir": f"{self.directory}/tmp",
            "dfs.replication": "1",
            "dfs.blocksize": str(BLOCK_BYTES),
            "dfs.heartbeat.interval": "1",
            "ipc.client.connect.max.retries": "100",  # a DataNode waits for its NameNode to come back
        }

    def _namenode_settings(self) -> dict[str, str]:
        return {
            **self._shared_settings(),
            "dfs.namenode.name.dir": f"file://{self._namenode.directory}/name",
            "dfs.namenode.http-address": f"127.0.0.1:{self._namenode.web_port}",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.edits.noeditlogchannelflush": "true",  # its process may die here, the machine does not
            "dfs.namenode.safemode.min.datanodes": "0",
            "dfs.namenode.heartbeat.recheck-interval": "1000",
            "dfs.namenode.replication.interval": "1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        }

    @staticmethod
    def _configure(daemon: _Daemon, settings: Mapping[str, str]) -> None:
        conf = daemon.directory / "conf"
        for application in ("hdfs", "datanode"):
            web = conf / "webapps" / application / "WEB-INF"
            web.mkdir(parents=True, exist_ok=True)
            (web / "web.xml").write_text("<web-app/>\n")
        rows = "".join(
            f"<property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
            for name, value in settings.items()
        )
        for name in ("core-site.xml", "hdfs-site.xml"):
            (conf / name).write_text(f"<configuration>\n{rows}</configuration>\n")
        (conf / "log4j.properties").write_text(_LOG4J)
        (conf / "hadoop-metrics2.properties").write_text("*.period=1\n")  # how old its counters may be, in seconds


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


class _Daemon:
    """One Java process with its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = ""
        self.web_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name: str, *arguments: str) -> None:
        assert not self.alive, f"{self.directory.name} runs already"
        conf = self.directory / "conf"
        tie = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        command = [_java(), *_JAVA_OPTIONS, "-cp", f"{conf}:{_jars()}/*", name, *arguments]
        variables = {key: value for key, value in os.environ.items() if not key.startswith("HADOOP_")}
        with self._log.open("ab", buffering=0) as log:
            self._process = subprocess.Popen(
                [*tie, *command],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is for whoever started it
                env=variables,
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
            self._process = None

    def wait_ended(self, wait_s: float) -> None:
        assert self._process is not None
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.directory.name} does not end: {self.last_words()}") from None
        if code:
            raise RuntimeError(f"{self.directory.name} ended with {code}: {self.last_words()}")

    def bean(self, service: str, name: str) -> dict[str, Any]:
        """What it says of itself on its web interface; {} if it does not answer."""
        url = f"http://127.0.0.1:{self.web_port}/jmx?qry=Hadoop:service={service},name={name}"
        try:
            with _DIRECT.open(url, timeout=_ASK_S) as answer:
                beans = json.load(answer)["beans"]
        except (OSError, ValueError, KeyError):
            return {}
        return dict(beans[0]) if beans else {}

    def last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        complaints = [line for line in lines if " ERROR " in line or " FATAL " in line or "Exception" in line]
        return " | ".join((complaints or lines)[-3:])

    @property
    def _log(self) -> Path:
        return self.directory / "log"


def _java() -> str:
    """$JAVA_HOME's java, else the one on the PATH; empty if there is none."""
    home = os.environ.get("JAVA_HOME")
    own = shutil.which("java", path=f"{home}/bin") if home else None
    return own or shutil.which("java") or ""


def _jars() -> Path:
    chosen = os.environ.get(JARS)
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / _CHECKOUT_JARS


def _free_ports(count: int) -> Sequence[int]:
    """Free now, and all different: each is held until the last is found."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                probe.bind(("127.0.0.1", random.choice(_PORTS)))
            except OSError:  # taken
                probe.close()
            else:
                held.append(probe)
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()
