"""verl's own tests of its interaction, as its package has them, with our stand-ins in place of verl."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).parents[4] / ".peers"
ASYNC = """
import asyncio, inspect, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "asyncio: a coroutine")

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
"""


def test_verls_tests_of_its_interaction_pass_with_the_command_run(tmp_path: Path) -> None:
    shutil.copy(PEERS / "tests" / "interactions" / "test_gsm8k_interaction.py", tmp_path)
    (tmp_path / "conftest.py").write_text(ASYNC)
    words = ["run", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found := re.search(r"(\d+) passed", done.stdout)) and int(found[1]) >= 13, done.stdout


def test_a_program_gets_its_arguments_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    code = "import sys, helper\nfrom verl.interactions.base import BaseInteraction\n"
    (tmp_path / "program.py").write_text(code + "print(sys.argv[1:], BaseInteraction.__name__)\n")
    (tmp_path / "helper.py").write_text("from verl.tools.base_tool import BaseTool\n")
    words = [sys.executable, "-m", "trainer.cli", "run"]
    done = subprocess.run(
        [*words, "program.py", "--steps", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "['--steps', '3'] BaseInteraction\n", done.stderr
    done = subprocess.run([*words, "none.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "none.py: there is no such file" in done.stderr
