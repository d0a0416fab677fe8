"""The settings of `environment: harbor:FOLDER`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import BeforeValidator

from gateway.config.entries import SandboxTool
from gateway.errors import ConfigError
from gateway.sandbox.sandbox_settings import SandboxSettings
from mtrl_plugins.environments.settings import EnvironmentSettings

if TYPE_CHECKING:
    from gateway.session import AnyGateway
    from gateway.toolset import Toolset
    from mtrl_plugins.harbor.task_file import HarborTask
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.steppers import Stepper

MOST = {"memory_mb": 4096, "cpus": 2.0, "disk_mb": 4096, "files": 200_000, "processes": 512}
REWARD = "mtrl_plugins.harbor.harbor_rollout:harbor_reward"


class HarborSettings(EnvironmentSettings):
    """A folder of Harbor tasks: the policy works in a sandbox, and the tests give the reward."""

    framework: ClassVar[str] = "harbor"
    has_boxes: ClassVar[bool] = True

    tools: tuple[SandboxTool, ...] = ("shell",)
    """The policy's tools."""
    sandbox: Annotated[
        SandboxSettings, BeforeValidator(lambda value: {**MOST, **value} if isinstance(value, Mapping) else value)
    ] = SandboxSettings.model_validate(MOST)
    """What a task may have at most. `network`: what is `public`; `root`: that of tasks whose image has none."""
    roots: dict[str, str] = {}
    """The root of an image, or of a task with a Dockerfile, by its name; by default it has that name, in lower case."""
    env: tuple[str, ...] = ()
    """Environment variables that `${NAME}` in the `env` and `headers` of task files may stand for."""
    mcp_hosts: tuple[str, ...] = ()
    """Hosts of the tasks' MCP servers, by their whole names. Tools are called from here: no box reaches these hosts."""
    held_out: Path | None = None
    """A folder with the tasks of `environment:eval`."""

    def defaults(self) -> dict[str, Any]:
        """What a run file need not say."""
        values: dict[str, Any] = {
            "data": "environment",
            "reward": {"components": {"environment": {"function": REWARD, "batched": True}}},
            "limits": {"assistant_turns": 50, "user_turns": 50, "tool_calls": 100, "timeout_s": 3600.0},
        }
        return values if self.held_out is None else {**values, "evaluation": {"data": "environment:eval"}}

    def for_agent(self) -> Self:
        return self if "tools" in self.model_fields_set else self.model_copy(update={"tools": ()})

    def check(self, settings: BaseRolloutSettings) -> None:
        super().check(settings)
        if getattr(settings, "agent", None) is not None:
            if self.tools:
                raise ValueError("an `agent` brings its own tools: remove `environment.tools`")
            if self.sandbox.provider is not None:
                raise ValueError(f"agents do not run in a `{self.sandbox.provider.key}`: remove it, or `agent`")

    @cached_property
    def folders(self) -> Mapping[str, Mapping[str, Path]]:
        """The directories of all tasks by name, in each split. Raises ConfigError."""
        from mtrl_plugins.harbor.task_file import list_tasks
        from trainer.data.tasks import example_names, load_example  # it imports the settings

        if self.id in example_names() and not Path(self.id).exists():
            example: Any = load_example(self.id)
            return {split: list_tasks(folder) for split, folder in example.find_task_folders().items()}
        found: dict[str, Mapping[str, Path]] = {"train": list_tasks(Path(self.id).expanduser())}
        if self.held_out is not None:
            found["eval"] = list_tasks(self.held_out.expanduser())
        return found

    def read(self, name: str) -> HarborTask:
        """The task of a name. Raises ConfigError."""
        from mtrl_plugins.harbor.task_file import read_task

        for folders in self.folders.values():
            if name in folders:
                return read_task(name, folders[name])
        remedy = "write `data: environment`, or give rows the names of tasks as `id`"
        raise ConfigError(f"there is no task {name!r:.80} in {self.id}", remedy=remedy)

    def make_rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        if split not in self.folders:
            raise ConfigError("there are no held-out tasks", field="environment.held_out", remedy="name their folder")
        return [{"id": name, "prompt": _read_prompt(folder)} for name, folder in self.folders[split].items()]

    def make_toolset(self) -> Toolset:
        from mtrl_plugins.harbor.harbor_toolset import HarborToolset

        return HarborToolset(self)

    def make_stepper(self) -> Stepper:
        from mtrl_plugins.harbor.harbor_rollout import HarborStepper

        return cast("Stepper", HarborStepper())

    def require_ready(self) -> None:
        from gateway.sandbox.choose_provider import find_provider_problem

        if problem := find_provider_problem(self.sandbox):
            raise ConfigError(f"tasks cannot be played here: {problem}", field="environment.sandbox")

    async def try_out(self, gateway: AnyGateway, settings: BaseRolloutSettings) -> str:
        """Reads all tasks, and plays the solutions of some. Raises ConfigErrors with what is wrong."""
        from mtrl_plugins.harbor.try_tasks import try_tasks

        return await try_tasks(self, gateway, getattr(settings, "agent", None), settings.limits.timeout_s)


def _read_prompt(folder: Path) -> str:
    """What a row shows; the rollout itself begins with the instruction of the task or of its first step."""
    from mtrl_plugins.harbor.task_file import INSTRUCTION, read_text

    try:
        return read_text(folder / INSTRUCTION, folder)[:4096].strip() or folder.name
    except ConfigError:
        return folder.name
