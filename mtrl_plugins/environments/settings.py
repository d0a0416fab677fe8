"""Settings of environments of other frameworks: names, interpreters, seeds and deadlines."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from trainer.rollout.run_part import RunPart

if TYPE_CHECKING:
    from gateway.session import AnyGateway
    from gateway.toolset import Toolset
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.steppers import Stepper

HERE = Path(__file__).parent


class EnvironmentSettings(RunPart):
    """One environment of another framework."""

    brings_rows: ClassVar[bool] = True
    acts_unseen: ClassVar[bool] = True
    framework: ClassVar[str]
    """The name of the settings in a run file, and of the environment's rows as `data`."""
    adapter: ClassVar[Path]
    """The file that the host process loads."""

    environment: Annotated[str, Field(min_length=1)]
    """The environment's name, as its framework knows it."""
    args: dict[str, Any] = {}
    """Its arguments."""
    python: str | None = None
    """The Python that has the framework, such as `/path/to/venv/bin/python`. By default the one that `mtrl-train env
    install` made."""
    start_s: PositiveFloat = 300.0
    """Seconds that it may take to load."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that it may take for its part of a turn, or for a rollout's start."""

    @property
    def name(self) -> str:
        """The environment in messages."""
        return f"{self.framework} environment {self.environment!r}"

    def load_args(self) -> dict[str, Any]:
        """What the adapter is given to load the environment."""
        return self.args

    def defaults(self) -> dict[str, Any]:
        """What a run file need not say."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, values: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
        from mtrl_plugins.environments.frameworks import use_environment

        return use_environment(values, fields)

    def check(self, settings: BaseRolloutSettings) -> None:
        for name in ("tools", "stepper"):
            if getattr(settings, name) != type(settings).model_fields[name].default:
                raise ValueError(f"`{name}` and `{self.framework}` exclude each other: an environment has its own")

    def make_toolset(self) -> Toolset:
        from mtrl_plugins.environments.open_environment import make_environment_toolset

        return make_environment_toolset(self)

    def make_stepper(self) -> Stepper:
        from mtrl_plugins.environments.open_environment import make_environment_stepper

        return make_environment_stepper(self)

    def find_rows(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        from mtrl_plugins.environments.open_environment import find_environment_rows

        return find_environment_rows(self, name)

    def record(self, *, is_on: bool) -> Callable[[Path], None] | None:
        from mtrl_plugins.environments.recorded_host import record_host

        tape = record_host(self, record=is_on)
        return None if tape is None else tape.start

    def replay(self, tape: Path) -> AbstractContextManager[None]:
        from mtrl_plugins.environments.recorded_host import replay_host

        return replay_host(self, tape)

    async def try_out(self, gateway: AnyGateway) -> str:
        from mtrl_plugins.environments.check_environment import describe_environment

        return await describe_environment(self, gateway)


class RunnerSettings(EnvironmentSettings):
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
        return {"data": self.framework, "reward": reward}


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
    """Seconds that a rollout waits for one of the `sessions`; they count towards its `limits.wall_s`."""

    def defaults(self) -> dict[str, Any]:
        """What a run file need not say. Turns without a valid action are no steps, so there is room for some."""
        function = "tools" if self.actions == "tool" else "feedback"
        turns = self.max_steps + 8
        return {
            "data": self.framework,
            "evaluation": {"data": f"{self.framework}:eval"},
            "reward": {"components": {"environment": {"function": function}}},
            "limits": {"assistant_turns": turns, "user_turns": turns, "tool_calls": turns},
        }


class GymnasiumSettings(EpisodeSettings):
    """An environment of Gymnasium, such as `FrozenLake-v1`, or `module:Name-v0` of a package that registers its own.
    `args` are those of `gymnasium.make`, such as `render_mode: rgb_array` for images."""

    key: ClassVar[str] = "gymnasium"
    framework: ClassVar[str] = "gymnasium"
    adapter: ClassVar[Path] = HERE / "gymnasium_adapter.py"

    action_names: tuple[str, ...] = ()
    """Names of a discrete space's actions, in order, by which the policy calls them instead of by number."""

    def load_args(self) -> dict[str, Any]:
        return {"make": self.args, "action_names": self.action_names}


class TextArenaSettings(EpisodeSettings):
    """A game of TextArena, such as `GuessTheNumber-v0`. `args` are those of `textarena.make`."""

    key: ClassVar[str] = "textarena"
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


def _check_url(value: str) -> str:
    value = value.rstrip("/")
    if not value.startswith(("http://", "https://", "ws://", "wss://")):
        raise ValueError("should be the server's address, such as http://localhost:8000")
    return value


class OpenEnvSettings(EpisodeSettings):
    """An OpenEnv server, by its address. `args` are passed to each `reset`."""

    key: ClassVar[str] = "openenv"
    framework: ClassVar[str] = "openenv"
    adapter: ClassVar[Path] = HERE / "openenv_episodes.py"

    environment: Annotated[str, AfterValidator(_check_url)]
    """The server's address, such as `http://localhost:8000`."""
    python: None = None
    """Not used: the server runs in a Python of its own."""
    sessions: PositiveInt = 64
    """Episodes that are open at once; further rollouts wait. Not more than the server's `max_concurrent_envs`."""
    token_variable: str = ""
    """The environment variable with a token, which is sent as `Authorization: Bearer TOKEN`."""
