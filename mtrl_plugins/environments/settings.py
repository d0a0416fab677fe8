"""The run file's `environment`: one of another framework, by its name or with settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, cast

from pydantic import GetCoreSchemaHandler, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_core import CoreSchema, core_schema

from gateway.errors import ConfigError
from gateway.plugins import find_all, find_missing, load_name
from trainer.rollout.run_part import RunPart

if TYPE_CHECKING:
    from gateway.session import AnyGateway
    from gateway.toolset import Toolset
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.steppers import Stepper

HERE = Path(__file__).parent


@cache
def framework_settings() -> Mapping[str, type[EnvironmentSettings]]:
    """The settings of each framework's environments."""
    return {name: load_name(target) for name, target in find_all(lambda plugin: plugin.environments).items()}


class EnvironmentSettings(RunPart, defer_build=True):
    """An environment of another framework, as `gymnasium:NAME`, `textarena:NAME`, `openenv:URL`, `verifiers:PACKAGE`
    or `harbor:FOLDER`, or as a mapping with that `name` and the framework's other settings. It brings its own tasks,
    tools and reward."""

    key: ClassVar[str] = "environment"
    brings_rows: ClassVar[bool] = True
    acts_unseen: ClassVar[bool] = True
    framework: ClassVar[str] = ""

    name: str
    """`FRAMEWORK:NAME`: the environment's name, as its framework knows it."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that it may take for its part of a turn, or for a rollout's start."""

    @property
    def id(self) -> str:
        """The environment's name, as its framework knows it."""
        return self.name.partition(":")[2]

    @property
    def title(self) -> str:
        """The environment in messages."""
        return f"{self.framework} environment {self.id!r}"

    @classmethod
    def kind_of(cls, value: object) -> type[EnvironmentSettings]:
        """The settings of the framework that a value names."""
        name = value.get("name") if isinstance(value, Mapping) else value
        return framework_settings().get(str(name).partition(":")[0], cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls is not EnvironmentSettings:
            return handler(source)
        forms = handler.generate_schema(Union[str, *framework_settings().values()])
        return core_schema.no_info_wrap_validator_function(lambda value, _: read_environment(value), forms)

    @classmethod
    def prepare(cls, values: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
        """The values with the environment's tasks, reward and limits, where the run file says nothing else."""
        if values.get("environment") is None:
            return values
        try:
            environment = read_environment(values["environment"])
        except ValueError:  # Reported with its place, as the section is validated.
            return {"data": "environment", **values}
        result = {**values, "environment": environment.for_agent() if values.get("agent") else environment}
        for name, default in environment.defaults().items():
            own = result.get(name)
            if isinstance(default, Mapping) and isinstance(own, Mapping):
                result[name] = {**default, **own}
            elif name in fields:
                result.setdefault(name, default)
        return result

    def for_agent(self) -> Self:
        """The environment as an agent plays it."""
        return self

    def defaults(self) -> dict[str, Any]:
        """What a run file need not say."""
        raise NotImplementedError

    def check(self, settings: BaseRolloutSettings) -> None:
        for name in ("tools", "stepper"):
            if getattr(settings, name) != type(settings).model_fields[name].default:
                raise ValueError(f"`{name}` and `environment` exclude each other: an environment has its own")

    def find_rows(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        section, _, split = name.partition(":")
        if section != self.key:
            return None
        if split not in ("", "train", "eval"):
            remedy = "write environment or environment:eval"
            raise ConfigError(f"has no split {split!r}", file=name, field="data", remedy=remedy)
        return self.make_rows(split or "train")

    def make_rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The rows of the split `train` or `eval`."""
        raise NotImplementedError

    async def try_out(self, gateway: AnyGateway, settings: BaseRolloutSettings) -> str:
        """What the environment is, and what it says first."""
        from mtrl_plugins.environments.host_process import host_key, hosts

        tools = ", ".join(spec.name for spec in gateway.specs if spec.audience == "policy")
        host = hosts.get(host_key(self))
        release = host.about.get("framework") if host is not None else None
        return await self.describe_trial(gateway, self.title + (f" ({release})" if release else ""), tools)

    async def describe_trial(self, gateway: AnyGateway, title: str, tools: str) -> str:
        """What it says about itself, given its tools. Raises GatewayError if no episode can be begun."""
        raise NotImplementedError


class HostedSettings(EnvironmentSettings):
    """An environment in a process of ours, with a Python that has its framework."""

    adapter: ClassVar[Path]
    """The file that the host process loads."""

    args: dict[str, Any] = {}
    """Its arguments."""
    python: str | None = None
    """The Python that has the framework, such as `/path/to/venv/bin/python`; by default the one that runs
    mtrl."""
    start_s: PositiveFloat = 300.0
    """Seconds that it may take to load."""

    def load_args(self) -> dict[str, Any]:
        """What the adapter is given to load the environment."""
        return self.args


class RunnerSettings(HostedSettings):
    """An environment whose own runner plays the rollouts. Its rows are the data, its tools the tools, its score the
    reward."""

    rows: PositiveInt = 10_000
    """Rows that are read of each of its data sets; an environment may have no end."""
    reasoning: Literal["separate", "inline"] = "separate"
    """Where the environment sees the policy's reasoning: `separate` (as `reasoning_content`, which most ignore), or
    `inline` (before the answer, in `<think>` and `</think>`)."""

    def defaults(self) -> dict[str, Any]:
        """What a run file need not say."""
        function = "mtrl_plugins.environments.reward:environment_reward"
        reward = {"components": {"environment": {"function": function, "batched": True}}}
        return {"data": "environment", "reward": reward}

    def make_toolset(self) -> Toolset:
        from mtrl_plugins.environments.conversations import EnvironmentToolset
        from mtrl_plugins.environments.host_process import get_host

        return EnvironmentToolset(get_host(self))

    def make_stepper(self) -> Stepper:
        from mtrl_plugins.environments.conversations import EnvironmentStepper

        return cast("Stepper", EnvironmentStepper(self))

    def make_rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        from mtrl_plugins.environments.conversations import read_rows

        return read_rows(self, split)

    def record(self, *, is_on: bool) -> Callable[[Path], None] | None:
        from mtrl_plugins.environments.host_process import HostTape, get_host

        tape = get_host(self).tape = HostTape() if is_on else None
        return None if tape is None else tape.start

    def replay(self, tape: Path) -> AbstractContextManager[None]:
        from mtrl_plugins.environments.host_process import RecordedHost, replace_host

        return replace_host(RecordedHost(self, tape))

    async def describe_trial(self, gateway: AnyGateway, title: str, tools: str) -> str:
        return f"{title} offers {tools or 'no tools'}"


class EpisodeSettings(EnvironmentSettings):
    """An environment with `reset` and `step`: mtrl plays its episodes, each from a seed."""

    n_tasks: PositiveInt = 1000
    """Tasks to generate; each is a seed, which all rollouts of its group share."""
    n_eval_tasks: PositiveInt = 100
    """Tasks of the `eval` split, whose seeds no training task has."""
    first_seed: NonNegativeInt = 0
    """The seed of the first training task."""
    prompt: str | None = None
    """The prompt, which the first observation follows. By default it says how to act."""
    actions: Literal["tool", "text"] = "tool"
    """How the policy acts: by calls of the tool `step`, or with the `text` of each of its turns."""
    max_steps: PositiveInt = 32
    """Steps after which an episode is truncated. Limits of the run file's `limits` that are not set follow it."""
    show_reward: bool = True
    """The policy reads the reward of each step."""
    sessions: PositiveInt = 256
    """Episodes that are open at once; further rollouts wait."""
    wait_s: PositiveFloat = 300.0
    """Seconds that a rollout waits for one of the `sessions`; they count towards its `limits.timeout_s`."""

    def defaults(self) -> dict[str, Any]:
        """What a run file need not say. Turns without a valid action are no steps, so there is room for some."""
        function = "tools" if self.actions == "tool" else "feedback"
        turns = self.max_steps + 8
        return {
            "data": "environment",
            "evaluation": {"data": "environment:eval"},
            "reward": {"components": {"environment": {"function": function}}},
            "limits": {"assistant_turns": turns, "user_turns": turns, "tool_calls": turns},
        }

    def make_stepper(self) -> Stepper:
        from mtrl_plugins.environments.episodes import EpisodeStepper

        return cast("Stepper", EpisodeStepper(self))

    def make_rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        from mtrl_plugins.environments.episodes import make_rows

        return make_rows(self, split)

    async def describe_trial(self, gateway: AnyGateway, title: str, tools: str) -> str:
        from mtrl_plugins.environments.episodes import describe_opening

        acts = f"actions by the tools {tools}" if self.actions == "tool" else "each turn is an action"
        return f"{title}: {acts}; seed {self.first_seed} begins with{await describe_opening(self, gateway)}"


class HostedEpisodes(EpisodeSettings, HostedSettings):
    """An environment with `reset` and `step` in a process of ours."""

    def make_toolset(self) -> Toolset:
        from mtrl_plugins.environments.episodes import EpisodeToolset, ProcessEpisodes
        from mtrl_plugins.environments.host_process import get_host

        return EpisodeToolset(self, ProcessEpisodes(get_host(self)))


class GymnasiumSettings(HostedEpisodes):
    """An environment of Gymnasium, such as `FrozenLake-v1`, or `module:Name-v0` of a package that registers its own.
    `args` are those of `gymnasium.make`, such as `render_mode: rgb_array` for images."""

    framework: ClassVar[str] = "gymnasium"
    adapter: ClassVar[Path] = HERE / "gymnasium_adapter.py"

    action_names: tuple[str, ...] = ()
    """Names of a discrete space's actions, in order, by which the policy calls them instead of by number."""

    def load_args(self) -> dict[str, Any]:
        return {"make": self.args, "action_names": self.action_names}


class TextArenaSettings(HostedEpisodes):
    """A game of TextArena, such as `GuessTheNumber-v0`. `args` are those of `textarena.make`."""

    framework: ClassVar[str] = "textarena"
    adapter: ClassVar[Path] = HERE / "textarena_adapter.py"

    actions: Literal["tool", "text"] = "text"
    """How the policy acts: with the text of each of its turns, or by calls of the tool `step`."""
    players: PositiveInt | None = None
    """The number of players; by default the fewest that the game takes."""
    player: NonNegativeInt = 0
    """The policy's seat."""
    opponent: str | tuple[str, ...] | dict[str, Any] = "random"
    """Who plays the other seats: `random` (one of the moves in brackets that the game shows), a list of texts, a
    function as `folder/file.py:name` (`name(observation)` returns a text), or a model: `{url: http://host/v1, model:
    NAME}`."""

    def load_args(self) -> dict[str, Any]:
        table = {"players": self.players, "player": self.player, "opponent": self.opponent}
        return {"make": self.args, **table}


class OpenEnvSettings(EpisodeSettings):
    """An OpenEnv server, by its address."""

    framework: ClassVar[str] = "openenv"
    args: dict[str, Any] = {}
    """Arguments of each `reset`."""
    sessions: PositiveInt = 64
    """Episodes that are open at once; further rollouts wait. Not more than the server's `max_concurrent_envs`."""
    token_variable: str = ""
    """The environment variable with a token, which is sent as `Authorization: Bearer TOKEN`."""

    def make_toolset(self) -> Toolset:
        from mtrl_plugins.environments.episodes import EpisodeToolset
        from mtrl_plugins.environments.openenv import OpenEnvEpisodes

        return EpisodeToolset(self, OpenEnvEpisodes(self))

    @field_validator("name")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if not value.partition(":")[2].startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError("should be the server's address; write it as `openenv:http://localhost:8000`")
        return value


def read_environment(value: object) -> EnvironmentSettings:
    """The settings that `FRAMEWORK:NAME` or a mapping with such a `name` means. Raises ValueError."""
    if isinstance(value, EnvironmentSettings):
        return value
    given = {"name": value} if isinstance(value, str) else value
    framework, _, name = str(given.get("name", "")).partition(":") if isinstance(given, Mapping) else ("", "", "")
    if plugin := find_missing(framework):
        raise ValueError(f"`{framework}:...` needs the plug-in `{plugin}`, which is not installed")
    kind = framework_settings().get(framework)
    if kind is None or not name:
        forms = "gymnasium:NAME, textarena:NAME, openenv:URL, verifiers:PACKAGE or harbor:FOLDER"
        raise ValueError(f"should be {forms}; write it as the text, or as `name` with other settings beside it")
    return kind.model_validate(given)
