"""Finds and copies the files that a run uses: run file, tools, servers' scripts, rewards, interactions, small data.

Only what is named by a setting for files is copied, and Python modules of the user that were loaded.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.config.reader import read_file
from gateway.config.server_paths import project_folder
from gateway.errors import GatewayError
from trainer.data.examples import example_names
from trainer.data.tasks import iterate_texts
from trainer.setup import SERVERS_FILE
from trainer.train.hidden_secrets import hide_in_config, holds_secrets, may_hold_secrets

if TYPE_CHECKING:
    from trainer.train.job import Job
    from trainer.train.settings import TrainSettings

OUTSIDE = "outside"
MAX_FILE_BYTES = 16 << 20
"""Larger files, such as big data sets, are not copied."""
MAX_BYTES = 64 << 20
"""Of all copies."""
MAX_FILES = 2000
TOO_LARGE = "too large"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
CONFIG_SUFFIXES = (".json", ".toml", ".yaml", ".yml")
MAX_LISTED = 100
"""Files that are listed as not copied."""
SKIPPED = ("__pycache__", "node_modules", "site-packages", "runs")
CODE = re.compile(r"(?P<path>[^\n:]+\.py):(?P<name>[\w.]+)")
"""A user's function or class, as `folder/file.py:name`."""
DATA_SETTINGS = ("data", "evaluation.data", "curriculum.stages.data")
FILE_SETTINGS = (*DATA_SETTINGS, "tools", "mcp", "template.chat_template", "agent.cwd")
SERVER_KEYS = ("command", "args", "cwd", "state", "states")
"""Keys of a server's entry that may name files which it needs."""
PACKAGE = Path(__file__).parents[1]
INSTALLED = (Path(sys.prefix), Path(sys.base_prefix), PACKAGE, PACKAGE.with_name("gateway"))


def map_files(settings: TrainSettings, change: Callable[[str, str], str]) -> dict[str, Any]:
    """The settings as a mapping, with each file's path changed; `change` gets the setting's name and the path."""

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(item, f"{name}.{key}".lstrip(".")) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(item, name) for item in value)
        if not isinstance(value, str | Path):
            return value
        text = str(value)
        if (code := CODE.fullmatch(text)) is not None:
            return f"{change(name, code['path'])}:{code['name']}"
        if name not in FILE_SETTINGS or "\0" in text or "\n" in text or text in settings.objects:
            return value
        if name not in DATA_SETTINGS:
            return change(name, text)
        return ",".join(part if part in example_names() else change(name, part) for part in text.split(","))

    mapped: dict[str, Any] = walk(settings.model_dump(), "")
    return mapped


def copy_files(job: Job, run_file: Path | None, copies: Path, run: Path) -> dict[str, str]:
    """Copies the files that a job uses, as they are in the working folder; returns those that were not, and why."""
    here = Path.cwd()
    plan = _FilePlan(here)
    if run_file is not None:
        plan.add_config(run_file)
    map_files(job.settings, plan.add_setting)
    if plan.data and _has_media(job):
        plan.left_out |= dict.fromkeys(map(str, plan.data), "its rows name images or videos")
    else:
        plan.files += plan.data
    agent = getattr(job.settings, "agent", None)
    if agent is not None and agent.command is not None:
        plan.left_out["agent.command"] = "a program"
    plan.files += _find_user_modules(plan.roots)
    return plan.left_out | _copy(plan, copies, run.resolve())


class _FilePlan:
    """The files and folders to copy, most important first."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.files: list[Path] = []
        self.data: list[Path] = []
        self.configs: set[Path] = set()
        """Configuration files, whose secrets are hidden."""
        self.roots = [here]
        """Folders of the user's modules."""
        self.left_out: dict[str, str] = {}

    def add_setting(self, name: str, text: str) -> str:
        path = Path(os.path.abspath(text))
        with suppress(OSError):
            if name in DATA_SETTINGS and text.endswith(".py"):
                return text
            if name in DATA_SETTINGS:
                self.data += [path] if path.exists() else []
            elif name in ("tools", "mcp"):
                self._add_tools(path)
            elif text.endswith(".py"):
                self._add_script(path)
            elif path.exists():
                self.files.append(path)
        return text

    def add_config(self, file: Path) -> None:
        path = Path(os.path.abspath(file))
        if not path.is_relative_to(PACKAGE):
            self.configs.add(path)
            self.files.append(path)

    def _add_tools(self, path: Path) -> None:
        servers = path.parent / SERVERS_FILE
        if path.is_file():
            self.add_config(path)
        if path.is_dir():
            for file in (file for file in path.glob("*.y*ml")):
                self.add_config(file)
            self.roots.append(path)
            self.files.append(path)
        for file in (path, servers):
            if file.is_file() and file.suffix in (".json", ".toml"):
                self.add_config(file)
                self._add_servers(file)

    def _add_servers(self, file: Path) -> None:
        """Adds the programs, scripts and states of servers that a servers file starts."""
        try:
            content = read_file(file)
        except GatewayError:
            return
        for key, text in _server_files(content):
            if not text or len(text) > 4096 or "\0" in text or text.startswith("-"):
                continue
            for folder in {project_folder(file): None, self.here: None}:
                path = Path(os.path.abspath(folder / text))
                with suppress(OSError):
                    if path.is_file() and path.suffix == ".py":
                        self._add_script(path)
                    elif _names_a_file(key, text, path) and path.is_relative_to(self.here):
                        self.files.append(path)

    def _add_script(self, path: Path) -> None:
        """Adds a Python file, and those beside it, which it may import."""
        if path.is_file() and not any(path.is_relative_to(place) for place in INSTALLED):
            self.roots.append(path.parent)
            self.files += [path, *islice(sorted(path.parent.glob("*.py")), MAX_LISTED)]


def _names_a_file(key: str, text: str, path: Path) -> bool:
    """Whether a text of a server's entry means this path, rather than a program or a word of the same name."""
    is_meant = key not in ("command", "args") or "/" in text or (path.is_file() and bool(path.suffix))
    return is_meant and path.exists()


def _server_files(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Texts in entries of servers that may name files, each with its key."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from _server_files(value, key if key == "states" else str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _server_files(value, key)
    elif isinstance(content, str) and key in SERVER_KEYS:
        yield key, content


def _has_media(job: Job) -> bool:
    """Whether rows name images or videos, which are files beside the data."""
    columns = job.settings.columns
    keys = (columns.image_key, columns.video_key)
    for source in job.tasks.train.values():
        for task in islice(iterate_texts(source), MAX_LISTED):
            contents = [message.get("content") for message in task.messages]
            parts = [part for content in contents if isinstance(content, list) for part in content]
            if any(task.columns.get(key) for key in keys) or any(part.get("type") != "text" for part in parts):
                return True
    return False


def _find_user_modules(roots: Iterable[Path]) -> Iterator[Path]:
    """Modules that were loaded from folders of the user's code, and are part of no installation."""
    for module in [*sys.modules.values()]:
        name = getattr(module, "__file__", None)
        file = Path(name) if isinstance(name, str) else None
        if file is None or file.suffix != ".py" or any(file.is_relative_to(place) for place in INSTALLED):
            continue
        if any(file.is_relative_to(root) for root in roots) and not {*file.parts} & {*SKIPPED}:
            yield file


def _copy(plan: _FilePlan, copies: Path, run: Path) -> dict[str, str]:
    """Copies files and folders; returns those that were too large, too many, not readable, or may hold secrets."""
    left_out: dict[str, str] = {}
    total = count = 0
    for file in dict.fromkeys(inner for path in plan.files for inner in _walk(path, run, plan.here)):
        target = copies / place_of(file, plan.here)
        if len(left_out) >= MAX_LISTED or count >= MAX_FILES:
            left_out["further files"] = "there are too many"
            break
        try:
            size = file.stat().st_size
            problem = _problem_of(file, size, total, plan)
            if problem or not _copy_file(file, target, is_config=file in plan.configs):
                left_out[str(file)] = problem or "secrets in it cannot be told apart"
                continue
            total, count = total + size, count + 1
        except OSError as error:
            left_out[str(file)] = describe_copy_error(error)
    return left_out


def describe_copy_error(error: OSError) -> str:
    """Why something is left out; raises the error if the disk takes nothing more."""
    # The error of a copied folder has the texts of its files' errors, and no number.
    if any(os.strerror(code) in str(error) for code in NO_ROOM):
        raise error
    return "could not be read" if error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT) else "could not be copied"


def _problem_of(file: Path, size: int, total: int, plan: _FilePlan) -> str:
    if size > MAX_FILE_BYTES or total + size > MAX_BYTES:
        return TOO_LARGE
    if file in plan.configs or file in plan.data:
        return ""
    # Another program's configuration, of which no secret is taken out: it may be a state that has to stay as it is.
    is_config = file.suffix in CONFIG_SUFFIXES
    has_secrets = may_hold_secrets(file) or (is_config and holds_secrets(file))
    return "may hold secrets" if has_secrets else ""


def _copy_file(file: Path, target: Path, *, is_config: bool) -> bool:
    """Copies a file with its mode, which may keep it from others; of a configuration file without its secrets."""
    text = hide_in_config(file) if is_config else ""
    if text is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_config:
        target.write_text(text, encoding="utf-8")
        shutil.copymode(file, target)
    else:
        shutil.copy(file, target)
    return True


def _walk(path: Path, run: Path, here: Path) -> Iterator[Path]:
    """The files of a folder, without hidden ones, runs and caches; or the file itself.

    Of the working folder and those above it, only configuration files and Python files at its top.
    """
    if path.is_file():
        yield path
        return
    if here.is_relative_to(path):
        yield from sorted(file for file in path.glob("*.*") if file.suffix in (".yaml", ".yml", ".py"))
        return
    for folder, names, files in os.walk(path):
        place = Path(folder)
        names[:] = sorted(
            name for name in names
            if name not in SKIPPED and name[0] != "." and place / name != run
            and not os.path.exists(place / name / "run.json")
        )  # fmt: skip
        yield from (place / name for name in sorted(files) if os.path.isfile(place / name))


def place_of(file: Path, here: Path) -> Path:
    """Where the copy of a file is, below the copies."""
    path = Path(os.path.abspath(file))
    return path.relative_to(here) if path.is_relative_to(here) else Path(OUTSIDE, *path.parts[1:])


def original_of(place: Path, here: Path) -> Path:
    """Where the original of a copy is: the inverse of `place_of`."""
    return Path("/", *place.parts[1:]) if place.parts[0] == OUTSIDE else here / place
