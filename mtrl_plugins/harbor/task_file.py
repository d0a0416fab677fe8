"""Reads directories of Harbor tasks: `task.toml` in schema 1.4, and the files beside it.

A task comes from anywhere. What is read of it lies in its own directory, and what cannot be done is refused by name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gateway.errors import ConfigError, ConfigErrors
from mtrl_plugins.harbor.users import ROOT

CONFIG, INSTRUCTION, DOCKERFILE, COMPOSE = "task.toml", "instruction.md", "Dockerfile", "docker-compose.yaml"
MAX_BYTES = 2**20
"""Of `task.toml` and of an instruction."""
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
"""A mark by which training data is found, which agents do not see."""
SIZE = re.compile(r"\s*([0-9.]{1,12})\s*([GMK])\s*", re.IGNORECASE)
STEP_NAME = re.compile(r"[^<>:\"/\\|?*\x00-\x1f]{0,254}[^<>:\"/\\|?*\x00-\x1f. ]")
LINK = "is a link that leads out of the task"
NOT_HERE = "remove it, or run this task with Harbor itself"
REFUSED: Mapping[str, tuple[Collection[Any], str]] = {
    "os": (("linux",), "boxes are Linux"),
    "gpus": ((0,), "a box has no GPU"),
    "tpu": ((), "a box has no TPU"),
    "service": (("main",), "a task has one box"),
    "healthcheck": ((), "no service of the image runs in a box"),
    "skills_dir": ((), "skills are for agents of their own"),
    "transport": (("sse", "http", "streamable-http"), "a box starts no MCP server: serve it over HTTP"),
    "exclude": (([],), "artifacts are collected whole"),
}
"""Keys of any table that cannot be done, but for some values."""
NOT_PROTECTED = "a box has one user, against whom shared tests are not protected: make `environment_mode` separate"
FREE_KEYS = ("metadata", "task", "env", "headers", "min_reward")
"""Tables whose keys are the author's own."""


def _parse_size(value: Any) -> Any:
    """The megabytes of `2G`, as older files write it."""
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()]) if match else value


def _rename_old_keys(value: Any) -> Any:
    names = {"memory": "memory_mb", "storage": "storage_mb"}
    if isinstance(value, dict) and value.get("allow_internet") is False:
        value = {"network_mode": "no-network", **value}
    return {names.get(key, key): item for key, item in value.items()} if isinstance(value, dict) else value


Size = Annotated[int | None, BeforeValidator(_parse_size), Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Source = Annotated[str, BeforeValidator(lambda value: value.get("source") if isinstance(value, dict) else value)]


class _Table(BaseModel):
    """A table of `task.toml`. Other keys say nothing about a rollout, or are among those that are refused."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_tables(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            is_table = isinstance(value[0] if isinstance(value, list) and value else value, dict)
            if is_table and name not in {*cls.model_fields, *REFUSED, *FREE_KEYS}:
                raise ValueError(f"Harbor has no table {name!r:.80} here")
        return values


class Network(_Table):
    """Which hosts are reached."""

    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] = ()
    env: dict[str, str] = {}


class Environment(Network):
    """A box."""

    docker_image: str = ""
    cpus: Annotated[float | None, Field(gt=0)] = None
    memory_mb: Size = None
    storage_mb: Size = None
    mcp_servers: tuple[dict[str, Any], ...] = ()
    workdir: Annotated[str, Field(pattern="^(/.*)?$")] = ""


class Collect(_Table):
    """A command that is run in the box before artifacts are collected."""

    command: str
    timeout_sec: Seconds = 60.0


class Phase(Network):
    """What the policy does, or the tests, or the solution."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Annotated[Environment | None, BeforeValidator(_rename_old_keys)] = None
    collect: tuple[Collect, ...] = ()


class Part(_Table):
    """What a task and its steps both have."""

    agent: Phase = Phase()
    verifier: Phase = Phase()
    artifacts: tuple[Source, ...] = ()


class StepTable(Part):
    """One of several instructions, each with tests of its own."""

    name: Annotated[str, Field(pattern=f"^{STEP_NAME.pattern}$")]
    min_reward: float | dict[str, float] | None = None


class TaskTable(Part):
    """`task.toml`."""

    schema_version: Annotated[
        str, Field(pattern=r"^1(\.|$)", validation_alias=AliasChoices("schema_version", "version"))
    ] = "1.4"
    environment: Annotated[Environment, BeforeValidator(_rename_old_keys)] = Environment()
    solution: Phase = Phase()
    steps: tuple[StepTable, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A directory of a task."""

    name: str
    folder: Path
    table: TaskTable

    @property
    def steps(self) -> Sequence[StepTable | None]:
        """Its steps; None stands for the only one of a task without `[[steps]]`."""
        return self.table.steps or (None,)

    def parts_of(self, step: StepTable | None) -> Sequence[Part]:
        """The tables that say something about a step, the closer first."""
        return (step, self.table) if step else (self.table,)

    def agent_time_of(self, step: StepTable | None) -> float | None:
        """The seconds that an agent has for a step, if the task says so."""
        return next((part.agent.timeout_sec for part in self.parts_of(step) if part.agent.timeout_sec), None)

    def users_of(self, step: StepTable | None) -> tuple[str | int | None, str | int | None]:
        """Who works in the policy's box, and who tests."""
        parts = self.parts_of(step)
        given = ([part.agent.user for part in parts], [part.verifier.user for part in parts])
        agent, verifier = (next((user for user in users if user is not None), None) for users in given)
        return agent, verifier

    def folders_of(self, step: StepTable | None) -> Sequence[Path]:
        """The directories with a step's files, the closer first."""
        return (self.folder / "steps" / step.name, self.folder) if step else (self.folder,)

    def read_instruction(self, step: StepTable | None) -> str:
        """What the policy is asked. Raises ConfigError."""
        file = self.folders_of(step)[0] / INSTRUCTION
        lines = read_text(file, self.folder).split("\n")
        while lines and (CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
            lines.pop(0)
        if not lines:
            raise ConfigError("is empty", file=file, remedy="write what is to be done")
        return "\n".join(lines)

    def tests_of(self, step: StepTable | None) -> list[Path]:
        """The folders of a step's tests; files of the later cover those of the earlier."""
        return [tests for folder in reversed(self.folders_of(step)) if (tests := folder / "tests").is_dir()]

    def is_separate(self, step: StepTable | None) -> bool:
        """Whether a step's tests run in a box of their own."""
        phases = [part.verifier for part in self.parts_of(step)]
        modes = (phase.environment_mode or (phase.environment and "separate") for phase in phases)
        return next(filter(None, modes), None) == "separate"


def list_tasks(folder: Path) -> dict[str, Path]:
    """The directories of tasks, by name: a folder that is one, or those in it. Raises ConfigError."""
    remedy = f"name a folder of Harbor tasks, each a directory with {CONFIG} and {INSTRUCTION}"
    try:
        folders = [folder] if _is_task(folder) else filter(_is_task, sorted(folder.iterdir()))
        found = {each.resolve().name: each for each in folders}
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=folder, remedy=remedy) from error
    if not found:
        raise ConfigError("has no tasks", file=folder, remedy=remedy)
    return found


def _is_task(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / INSTRUCTION).is_file()


def read_task(name: str, folder: Path) -> HarborTask:
    """A task. Raises ConfigErrors with all that is wrong with it, or that cannot be done."""
    file, errors = folder / CONFIG, list[ConfigError]()
    try:
        values = tomllib.loads(read_text(file, folder))
        task = HarborTask(name, folder, TaskTable.model_validate(values))
        for field, problem in [*_find_refused(values, ""), *_find_problems(task)]:
            errors.append(ConfigError(problem, file=file, field=field, remedy=NOT_HERE))
        for step in task.steps if not errors else ():
            task.read_instruction(step)
    except ValidationError as error:
        for each in error.errors(include_url=False, include_input=False):
            field = ".".join(map(str, each["loc"]))
            errors.append(ConfigError(each["msg"], file=file, field=field, remedy="correct it"))
    except (ValueError, RecursionError) as error:  # Also of a number with too many digits.
        raise ConfigError(f"is no TOML: {error}", file=file, remedy="correct it") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}", file=file, remedy="correct it") from error
    if errors:
        raise ConfigErrors(errors)
    return task


def _find_refused(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Keys that cannot be done, with the reason."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        name = f"{path}.{key}".lstrip(".")
        allowed, problem = REFUSED.get(str(key), ((), ""))
        if problem and (inner.lower() if isinstance(inner, str) else inner) not in allowed:
            yield name, f"{inner!r:.40}: {problem}"
        if key not in FREE_KEYS:
            yield from _find_refused(inner, name)


def _find_problems(task: HarborTask) -> Iterator[tuple[str, str]]:
    """What else cannot be done."""
    folder, names = task.folder, [step.name for step in task.table.steps]
    if len({*names}) < len(names):
        yield "steps", "two have one name"
    if (folder / "environment" / COMPOSE).exists():
        yield "environment", f"environment/{COMPOSE}: a task has one box"
    if not task.table.environment.docker_image and not (folder / "environment" / DOCKERFILE).is_file():
        yield "environment.docker_image", f"there is no image, and no environment/{DOCKERFILE}"
    users = {str("root" if user in ROOT else user) for user, _ in map(task.users_of, task.steps)}
    if len(users) > 1:  # What is closed to one is gone for the next.
        yield "agent.user", f"{', '.join(sorted(users))}: the steps of a task have one user"
    for step in task.steps:
        own = task.folders_of(step)[0]
        if not task.is_separate(step) and not any((tests / "test.sh").is_file() for tests in task.tests_of(step)):
            yield "verifier", f"{own.name}/tests/test.sh is missing, which writes /logs/verifier/reward.txt"
        if (user := task.users_of(step)[0]) not in ROOT and not task.is_separate(step):
            yield "agent.user", f"{user!r:.40}: {NOT_PROTECTED}"
        if (own / "trajectory.json").exists():
            yield "trajectory.json", "a conversation that came before cannot be continued"
        for base in dict.fromkeys((own, folder)):
            yield from _find_problems_of_files(base, folder)


def _find_problems_of_files(base: Path, folder: Path) -> Iterator[tuple[str, str]]:
    for name in ("tests", "solution", "workdir", "environment"):
        path = base / name
        if _leads_out(path, folder):
            yield str(path.relative_to(folder)), LINK
            continue
        if (path / ".harborignore").exists():
            yield str(path.relative_to(folder)), ".harborignore is not read"
        for inner in path.glob("*") if name == "tests" and base != folder else ():
            if _leads_out(inner, folder):  # Each is put in by its name.
                yield str(inner.relative_to(folder)), LINK


def _leads_out(path: Path, folder: Path) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def read_text(file: Path, folder: Path) -> str:
    """A file of a task. Raises ConfigError."""
    problem = ""
    try:
        if _leads_out(file, folder):
            problem = LINK
        elif not file.is_file():
            problem = "is missing"
        elif file.stat().st_size > MAX_BYTES:
            problem = f"has more than {MAX_BYTES >> 20} MB"
        else:
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}"
    raise ConfigError(problem, file=file, remedy=f"a task has {CONFIG} and {INSTRUCTION}, which are text")
