"""JSONL files with rows that are too long or nested too deep: refused or left out, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.errors import ReplayError
from gateway.line_file import iterate_lines
from gateway.tape.tape_file import load_tape
from mtrl_plugins.web.rollout_index import RolloutIndex
from mtrl_plugins.web.runs import ViewedRun
from mtrl_plugins.web.success_criterion import SuccessCriterion
from trainer.data.tasks import load_rows
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts, RunError
from trainer.storage.run_files import read_metrics
from trainer.storage.token_credit import CREDITS_FILE, CreditReader

GIGABYTE = 1 << 30
MEMORY_KB = 500_000
DEPTH = 10_000
DEEP = "[" * DEPTH + "]" * DEPTH
PROMPT = '{"prompt": [{"role": "user", "content": "1 + 1"}]}\n'
LOAD = """
import re, sys
from pathlib import Path
from gateway.errors import ConfigError, ConfigErrors
from trainer.data.tasks import load_rows
try:
    load_rows(Path(sys.argv[1]))
except (ConfigError, ConfigErrors) as error:
    print(error)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def write_sparse_row(file: Path, before: str, size: int) -> Path:
    """A file whose last row has so many zero bytes, which need no place on the disk."""
    file.write_text(before)
    with file.open("ab") as stream:
        stream.truncate(len(before) + size)
        stream.seek(0, 2)
        stream.write(b"\n")
    return file


def test_row_of_a_gigabyte_is_refused_by_file_and_line_in_little_memory(tmp_path: Path) -> None:
    file = write_sparse_row(tmp_path / "rows.jsonl", PROMPT, GIGABYTE)
    done = subprocess.run([sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True, timeout=120)
    *message, memory_kb = done.stdout.splitlines()
    assert "rows.jsonl:2: is a row of 1073741825 bytes, more than 67108864" in message[0], done.stderr
    assert "name large media by their path" in "".join(message) and int(memory_kb) < MEMORY_KB


def test_row_nested_too_deep_is_refused_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(PROMPT + f'{{"prompt": "a", "x": {DEEP}}}\n')
    with pytest.raises(Exception, match=r"rows\.jsonl:2: is a row that is nested deeper than 200 levels"):
        load_rows(file)


@pytest.fixture
def small_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of our own files may have 2000 bytes."""
    monkeypatch.setattr(iterate_lines, "__kwdefaults__", {"number": 1, "max_bytes": 2000})
    for module in ("trainer.storage.rollout_file", "mtrl_plugins.web.rollout_index", "mtrl_plugins.web.runs"):
        monkeypatch.setattr(f"{module}.MAX_LINE_BYTES", 2000)


@pytest.mark.parametrize("trick", ["long", "deep"])
def test_line_of_a_run_that_is_too_much_costs_only_itself(tmp_path: Path, trick: str, small_lines: None) -> None:
    depth = 900
    line = (
        f'{{"step": 2, "rollouts": "{"a" * 3000}"}}'
        if trick == "long"
        else f'{{"step": 2, "x": {"[" * depth}{"]" * depth}}}'
    )
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    assert [step["step"] for step in read_metrics(metrics)] == [1, 3]
    assert [step["step"] for step in ViewedRun("run", tmp_path).metrics(0)["lines"]] == [1, 3]
    rollouts = tmp_path / ROLLOUTS_FILE
    rollouts.write_text(f"{line}\n")
    with pytest.raises(RunError, match=r"rollouts\.jsonl: line 1: .*\n  remedy"):
        Rollouts(tmp_path)[0]
    assert list(Rollouts(tmp_path)) == []
    index = RolloutIndex(rollouts, SuccessCriterion())
    assert index.update() and index.select("SELECT stop FROM rollouts") == [{"stop": "damaged"}]
    index.close()
    (tmp_path / CREDITS_FILE).write_text(f'{{"step":1,"rollouts":{{}}}}\n{line.replace(": 2", ":2", 1)}\n')
    assert CreditReader(tmp_path).read(1, "a") is None and CreditReader(tmp_path).read(2, "a") is None
    (tmp_path / "tape.jsonl").write_text(f"{line}\n")
    with pytest.raises(ReplayError, match=r"tape\.jsonl: line 1 is damaged|this is not a tape"):
        load_tape(tmp_path)
