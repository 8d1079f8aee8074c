"""Settings for all tests. Machines are slow and shared, so no test of a property has a deadline of its own.

`--fast` (`make test-fast`) leaves out what is marked `more`, and whatever starts a process: there a test is skipped.
`--layers`, as in `make test`, says at the end how long each layer of tests took.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import let_children_find_tests

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("holdfast")

WITH_PROCESSES = ("demo", "end_to_end", "hosts", "security", "zoo")  # as a whole; others are skipped test by test
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
LAYERS = {
    "written side": ("docs", "test_tidy.py"),
    "simulator": ("simulator",),
    "everything": ("end_to_end", "hosts", "security", "demo", "drills", "zoo"),
}  # by directory; the rest is the parts, with and without processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that start no process")
    parser.addoption("--layers", action="store_true", help="say at the end how long each layer of tests took")


def pytest_configure(config: pytest.Config) -> None:
    """Started under nohup or in a script's background, this process ignores SIGINT, and so would all that it starts.

    Tests that press Ctrl-C rely on the ordinary disposition, so the tests set it for themselves and their children.
    """
    let_children_find_tests()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--layers"):
        config.pluginmanager.register(Layers())
    if config.getoption("--fast"):
        config.pluginmanager.register(NoProcesses())
        for left_open in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{left_open}")  # by tests that are skipped midway


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not even imported: half a minute of a busy machine."""
    if config.getoption("--fast") and collection_path.parent == Path(__file__).parent:
        return True if collection_path.name in WITH_PROCESSES else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        slow = [item for item in items if item.get_closest_marker("processes") or item.get_closest_marker("more")]
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [item for item in items if item not in left_out]


class NoProcesses:
    """Skips a test where it starts a process."""

    def __init__(self) -> None:
        self._refuses = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: Any) -> None:
        if self._refuses and event in STARTS and threading.current_thread() is threading.main_thread():
            pytest.skip("it starts a process")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[Any]:
        self._refuses = True
        try:
            return (yield)
        finally:
            self._refuses = False

    pytest_runtest_call = pytest_runtest_setup


class Layers:
    """Adds up how long tests took; those that share a server have its start with the first of them."""

    def __init__(self) -> None:
        self._took_s: Counter[str] = Counter()
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        place = Path(report.nodeid.partition("::")[0]).parts[1]
        layer = next((name for name, places in LAYERS.items() if place in places), "")
        if not layer:
            layer = "parts, with processes" if "processes" in report.keywords else "parts"
        self._took_s[layer] += report.duration
        self._tests[layer].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("time of each layer, of all jobs together")
        for layer, took_s in sorted(self._took_s.items(), key=lambda entry: entry[1]):
            terminalreporter.write_line(f"{took_s:8.1f} s  {layer}: {len(self._tests[layer])} tests")
