"""Follows a documentation page as a reader does: writes its files, runs its commands, and checks what they print."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from typer.testing import CliRunner

from gateway.cli import app as gateway_app
from tests.docs.blocks import EXECUTED, ROOT, SHOWN, Block, blocks_of, split_command
from tests.docs.servers import TIMEOUT_S, Server, installed, serves
from tests.docs.shrink import shrink_command
from tests.docs.validate import validate
from trainer.cli import app as trainer_app
from trainer.train.settings import TrainSettings

APPS = {"mtrl-gateway": gateway_app, "mtrl-train": trainer_app}
GATEWAY = "http://127.0.0.1:8765"


@dataclass(frozen=True)
class Done:
    block: Block
    command: str
    output: str


class Followed:
    """What was run, in order."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    def __getitem__(self, text: str) -> str:
        """The output of the first command, or program, that contains the text."""
        found = [item.output for item in self.done if text in item.command]
        assert found, f"no command of the page contains {text!r}: {[one.command for one in self.done]}"
        return found[0]

    @property
    def last_output(self) -> str:
        """What the last block printed, all of its commands together."""
        assert self.done, "an output is shown before any command"
        return "".join(item.output for item in self.done if item.block is self.done[-1].block)


class PageRunner:
    """Runs the blocks of a page in one folder; its servers stay up until the page ends."""

    def __init__(
        self, place: Path, small_job: Callable[[], TrainSettings], gateway: Callable[[], str] | None = None
    ) -> None:
        self.place = place
        self.small_job = small_job
        self.gateway = gateway
        self.addresses: dict[str, str] = {}
        """What the page calls a server -> where it is."""
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.stack.enter_context(contextlib.chdir(self.place))
        return self

    def __exit__(self, *raised: object) -> None:
        self.stack.close()

    def follow(self, page: Path) -> Followed:
        done = Followed()
        blocks = blocks_of(page)
        for block in blocks:
            assert block.language in (*EXECUTED, *SHOWN), f"{block}: no known language: {block.language!r}"
        for block in blocks:
            try:
                self._block(block, blocks, done)
            except Exception as error:
                error.add_note(f"in {block}")
                raise
        return done

    def _block(self, block: Block, blocks: list[Block], done: Followed) -> None:
        if block.is_output:
            assert_prints(block.text, done.last_output)
        elif block.file is not None:
            self._write(block)
        elif block.language == "bash":
            commands = ["\n".join(block.commands)] if block.needs_shell else block.commands
            for command in commands:
                output = self.run_shell(command) if block.needs_shell else self.run_command(command)
                done.done.append(Done(block, command, output))
        elif block.language == "python":
            done.done.append(Done(block, block.text, self.run_python(block)))
        elif block.language in EXECUTED:
            validate(block, blocks, self.place)

    def _write(self, block: Block) -> None:
        file = self.place / (block.file or "")
        assert file.resolve().is_relative_to(self.place.resolve()), f"{file} is outside of the reader's folder"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._placed(block.text), encoding="utf-8")
        if block.language in ("yaml", "json", "jsonl"):
            validate(block, [block], self.place)
        elif block.language == "python":
            compile(block.text, block.file or "", "exec")

    def run_command(self, command: str) -> str:
        """One command without shell syntax, as far as possible in this process."""
        words, prints = split_command(self._placed(command))
        if words[0] == "make":
            return self._run(["make", "--dry-run", *words[1:]])
        if words[:2] == ["source", ".venv/bin/activate"]:
            return ""
        if words[:2] == ["pip", "install"]:
            return _check_install(words[2:])
        if serves(words):
            return self._serve(words)
        if words[0] in APPS:
            output = self._invoke(words)
        elif words[0] == "python":
            output = self._python(words[1:])
        elif words[0] == "curl":
            output = self._run(["curl", "--fail-with-body", *words[1:]])
        else:
            raise AssertionError(f"{words[0]!r} is not a command that the tests run; show it in a `console` block")
        if prints is not None:
            assert_prints(prints, output)
        return output

    def run_shell(self, script: str) -> str:
        """Commands with pipes, variables or redirection, in one shell."""
        preamble = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'
        return self._run(["bash", "-c", preamble + self._placed(script)])

    def run_python(self, block: Block) -> str:
        """A program that a page shows; `__main__` is itself."""
        program = self.place / "shown_program.py"
        program.write_text(self._placed(block.text), encoding="utf-8")
        return self._python([str(program)])

    def _invoke(self, words: list[str]) -> str:
        words, replaced = shrink_command(words, self.place, self.small_job)
        if words[:2] == ["mtrl-gateway", "stdio"]:
            return self._run(words)
        result = CliRunner().invoke(APPS[words[0]], words[1:])
        output = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(f"{' '.join(words)}\n{output}") from result.exception
        assert result.exit_code == 0, f"{' '.join(words)}\n{output}"
        return replaced + output

    def _python(self, words: list[str]) -> str:
        """A script of the page, in this process; a script or module of the repository only has to be there."""
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"there is no module {words[1]}"
            return ""
        if not (self.place / words[0]).is_file():
            assert (ROOT / words[0]).is_file(), f"there is no file {words[0]}"
            return ""
        printed, argv, path = io.StringIO(), sys.argv, [*sys.path]
        sys.argv, sys.path = words, [str((self.place / words[0]).parent), *sys.path]
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(self.place / words[0]), run_name="__main__")
        finally:
            sys.argv, sys.path = argv, path
        return printed.getvalue()

    def _serve(self, words: list[str]) -> str:
        server = Server(words, self.place)
        self.addresses[f"127.0.0.1:{server.shown_port}"] = ""
        self.stack.enter_context(server)
        self.addresses[f"127.0.0.1:{server.shown_port}"] = server.url.removeprefix("http://")
        return server.url

    def _placed(self, text: str) -> str:
        """The text with the addresses that servers have here, and with a folder of the page's own for /tmp."""
        if self.gateway is not None and GATEWAY in text and "127.0.0.1:8765" not in self.addresses:
            self.addresses["127.0.0.1:8765"] = self.gateway().removeprefix("http://")
        for shown, real in self.addresses.items():
            text = text.replace(shown, real or shown)
        return re.sub(r"(?<![\w.])/tmp/", f"{self.place / 'tmp'}/", text)

    def _run(self, words: list[str]) -> str:
        (self.place / "tmp").mkdir(exist_ok=True)
        done = subprocess.run(
            words,
            cwd=self.place,
            env=installed(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout


def assert_prints(expected: str, output: str) -> None:
    """`...` stands for anything, within a line or over several; spaces at the ends of lines do not count."""
    pattern = r".*?".join(re.escape(part) for part in re.split(r"\.\.\.", _trimmed(expected)))
    assert re.search(rf"(?m:^){pattern}(?m:$)", _trimmed(output), re.DOTALL), (
        f"expected:\n{expected}\nprinted:\n{output}"
    )


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _check_install(words: list[str]) -> str:
    """Nothing is installed by a test: the extras that are asked for must exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [extra for word in words for found in re.findall(r"\[([\w,]+)\]", word) for extra in found.split(",")]
    unknown = {*extras} - {*project["optional-dependencies"]}
    assert not unknown, f"pyproject.toml has no extra {unknown}"
    return ""
