"""Fixtures for all tests: async tests run on asyncio, files are written to a temporary folder.

Tests are independent of their order: imported modules are forgotten, and random generators seeded.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from textwrap import dedent
from types import ModuleType

import pytest
from coverage import Coverage
from hypothesis import settings

from tests import forked_python
from tests.shared_folders import open_shared_folder
from tests.slow_files import SlowFiles

# Tiny matrix products are many times slower with several threads; tests of threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What gateways leave behind when tests kill them stays out of the user's folder, where the next run would find it.
os.environ["XDG_STATE_HOME"] = mkdtemp(prefix="mtrl-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Coverage of what tests start would double the time of its imports; what is forked is measured (forked_python.py).
    forked_python.COVERAGE.update({name: os.environ.pop(name) for name in [*os.environ] if "COVERAGE_PROCESS" in name})
open_shared_folder()  # before workers and other processes start, which inherit its name
# Tests run in the background ignore SIGINT, which every child process would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Examples have no deadline and are the same in every run; `pytest --hypothesis-profile wide` draws new ones each time.
settings.register_profile("wide", deadline=None, max_examples=200)
settings.register_profile("same", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("same")

Write = Callable[[str, str], Path]


def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as cores, since many tests wait for processes and deadlines; at most eight."""
    return max(2, min(8, len(os.sched_getaffinity(0)) * 3 // 2))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files of tests/slow_files.txt")
    parser.addoption("--write-slow-files", action="store_true", help="write tests/slow_files.txt from this run")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Names a failed test when it fails, not only at the end of half an hour; starts slow files first."""
    config.pluginmanager.register(SlowFiles(config))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # The processes that run the tests for another one have none.
        config.pluginmanager.register(FailureNames(reporter))


def pytest_sessionfinish() -> None:
    """Saves what was measured: pytest-xdist kills processes that take more than seconds to end, with what they have."""
    measuring = Coverage.current()
    if measuring is not None:
        measuring.save()


class FailureNames:
    """Prints the name of each test that fails, among the dots, and limits how many may pass on a second run.

    `--reruns 1` runs a failed test again, for machines that stand still for seconds. More than a few of those are no
    accident of the machine: then the whole run fails.
    """

    RERUNS = 5

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter
        self._rerun: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # an outcome of pytest-rerunfailures
            self._rerun.append(report.nodeid)
            self._reporter.write_line(
                f"\nFAILED now, runs again: {report.nodeid} ({report.when})\n{report.longreprtext}"
            )
        elif report.failed:
            self._reporter.write_line(f"\nFAILED now: {report.nodeid} ({report.when})\n{_reason(report)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self._rerun) > self.RERUNS:
            self._reporter.write_line(
                f"\n{len(self._rerun)} tests had to run twice, at most {self.RERUNS} may: the run fails"
            )
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _reason(report: pytest.TestReport) -> str:
    """The lines of the traceback that say what was wrong."""
    return "\n".join(line for line in report.longreprtext.splitlines() if line.startswith("E  "))


@pytest.fixture(autouse=True)
def forgotten(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets modules imported from temporary folders, because the next test's file may have the same name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before, temporary = {*sys.modules}, (tmp_path_factory.getbasetemp(), open_shared_folder())
    yield
    for name in {*sys.modules} - before:
        if any(_is_inside(folder, sys.modules[name]) for folder in temporary):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Seeds the random generators; torch only if it is already imported."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file below the working folder, an empty temporary one; the text may be indented."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
        return file

    return write


def _is_inside(folder: Path, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    places = [getattr(spec, "origin", None), *(getattr(spec, "submodule_search_locations", None) or ())]
    return any(str(place).startswith(str(folder)) for place in places)
