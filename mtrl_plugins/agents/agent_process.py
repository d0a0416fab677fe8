"""Runs an agent that is a program: a process per rollout in a folder of its own, whose children all end with it."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import anyio
from anyio import to_thread

from gateway.process.log_tail import LogTail
from gateway.process.pipe_process import (
    PIPE_ERRORS,
    ReadPipe,
    WritePipe,
    end_supervised,
    start_supervised,
    wait_for_exit,
)
from gateway.process.reaper import Reaper
from gateway.process.supervised_process import SupervisedProcess
from mtrl_plugins.agents.settings import AgentSettings

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE")
TASK_FILE = "task.json"
_LAST_OUTPUT_S = 0.5


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How a program ended."""

    code: int
    output: str
    """The end of its output and its errors."""
    is_late: bool = False
    """Whether it was ended since the task's time was over, which is no failure."""

    def describe(self) -> str:
        """The end in words, with the last lines of output."""
        how = f"was ended by signal {-self.code}" if self.code < 0 else f"exited with {self.code}"
        last = self.output.strip()[-400:]
        return f"{how}; its output ends: {last}" if last else how


async def run_agent(settings: AgentSettings, about: Mapping[str, Any], reaper: Reaper) -> AgentExit:
    """Runs the program to its end; cancelling it ends it and everything that it started."""
    await reaper.start()
    async with work_folder(settings.cwd, reaper) as folder:
        task_file = folder / TASK_FILE
        task_file.write_text(json.dumps(about["task"]), encoding="utf-8")
        work = folder / "work"
        words = make_words(about, str(work), str(task_file))
        write_files(settings, work, words)
        command = tuple(fill(word, words) for word in settings.words)
        environment = make_environment(settings, about, words, PASSED_ON)
        try:
            program = await start_supervised(command, env=environment, cwd=work, stdin=PIPE, stdout=PIPE, stderr=STDOUT)
        except OSError as error:
            return AgentExit(127, f"{command[0]} cannot be started: {error.strerror or error}")
        return await _run_to_end(program, settings, read_stdin(settings, about))


def make_environment(
    settings: AgentSettings, about: Mapping[str, Any], words: Mapping[str, str], passed_on: Iterable[str]
) -> dict[str, str]:
    """The environment of the program, with some variables of ours."""
    return {
        **{name: os.environ[name] for name in (*passed_on, *settings.inherit_env) if name in os.environ},
        "OPENAI_BASE_URL": about["base_url"],
        "OPENAI_API_KEY": about["api_key"],
        "ANTHROPIC_BASE_URL": about["anthropic_base_url"],
        "ANTHROPIC_API_KEY": about["api_key"],
        "GOOGLE_GEMINI_BASE_URL": about["anthropic_base_url"],
        "GEMINI_API_KEY": about["api_key"],
        "MTRL_MCP_URL": str(about.get("mcp_url", "")),
        **{name: fill(text, words) for name, text in settings.env.items()},
    }


def read_stdin(settings: AgentSettings, about: Mapping[str, Any]) -> bytes:
    """What the program reads."""
    texts = {"prompt": str(about["task"]["prompt"]), "json": json.dumps(about["task"]), "none": ""}
    return texts[settings.stdin].encode()


async def _run_to_end(program: SupervisedProcess, settings: AgentSettings, text: bytes) -> AgentExit:
    """Waits for the program, whose supervisor ends when nothing is left that it started."""
    output, drained = LogTail(settings.output_chars), anyio.Event()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_feed, WritePipe(program.supervisor.stdin), text)
            tasks.start_soon(_collect, ReadPipe(program.supervisor.stdout), output, drained)
            await wait_for_exit(program.supervisor, math.inf)
            with anyio.move_on_after(_LAST_OUTPUT_S):
                await drained.wait()
            tasks.cancel_scope.cancel()
    finally:
        await end_supervised(program, settings.stop_s, first_s=0.0)
    code = program.exit_code
    return AgentExit(-9 if code is None else code, output.text)


async def _feed(stdin: WritePipe, text: bytes) -> None:
    with suppress(*PIPE_ERRORS):
        await stdin.send(text)
    stdin.close()


async def _collect(stdout: ReadPipe, output: LogTail, drained: anyio.Event) -> None:
    with suppress(*PIPE_ERRORS):
        while data := await stdout.receive():
            output.add(data)
    drained.set()


@asynccontextmanager
async def work_folder(source: Path | None, reaper: Reaper) -> AsyncIterator[Path]:
    """A temporary folder with a copy of `source` as `work`; it is removed even if this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="mtrl-agent-"))
    reaper.add_folder(folder)
    try:
        if source is None:
            (folder / "work").mkdir()
        else:
            await to_thread.run_sync(lambda: shutil.copytree(source, folder / "work", symlinks=True))
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
        reaper.remove_folder(folder)


def write_files(settings: AgentSettings, work: Path, words: Mapping[str, str]) -> None:
    """Writes the files of the settings in the work folder."""
    for name, text in settings.files.items():
        _write_file(work, name, fill(text, words))


def _write_file(work: Path, name: str, text: str) -> None:
    """Writes a file in the work folder. Links in the copied folder are not followed: they may lead out of it."""
    folder = work
    for part in Path(name).parent.parts:
        folder /= part
        if folder.is_symlink():
            folder.unlink()
        folder.mkdir(exist_ok=True)
    file = work / name
    if file.is_symlink():
        file.unlink()
    file.write_text(text, encoding="utf-8")


def make_words(about: Mapping[str, Any], work: str, task_file: str) -> dict[str, str]:
    """What is put in for the words in braces."""
    names = ("base_url", "anthropic_base_url", "api_key", "model", "mcp_url")
    return {
        **{name: str(about.get(name, "")) for name in names},
        "prompt": about["task"]["prompt"],
        "folder": work,
        "task_file": task_file,
    }


def fill(text: str, words: Mapping[str, str]) -> str:
    """Replaces `{name}`; what is put in is not searched again."""
    parts = text.split("{")
    filled = [parts[0]]
    for part in parts[1:]:
        name, closed, rest = part.partition("}")
        filled.append(words[name] + rest if closed and name in words else "{" + part)
    return "".join(filled)
