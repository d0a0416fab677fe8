"""Environments of verifiers' v1 interface (tasksets), run by their own `SingleAgentEnv`, with its tools and rewards.

Runs in a host process, with the Python that has `verifiers`. A v1 rollout is a program (a harness) that chats with a
model; here it is `chat_harness.py`, which offers the task's tools and nothing else, as verifiers' `null` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from gateway.process.child_entry import load_file

if TYPE_CHECKING:
    from mtrl_plugins.environments.host_server import HostError, ModelEndpoint
else:
    from host_server import HostError

KEY_VARIABLE = "MTRL_POLICY_TOKEN"
HARNESS = "mtrl_chat_harness"


def load(module: ModuleType, name: str, args: dict[str, Any], endpoint: ModelEndpoint) -> V1Environment:
    """The environment of a taskset; `args` are the fields of the taskset's configuration."""
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    _check_parts(loaders, name)
    load_file(HARNESS, Path(__file__).with_name("chat_harness.py"))
    agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    try:
        config = loaders.resolve_env_config({"taskset": {"id": name, **args}, "agent": agent})
    except ValueError as error:
        raise HostError(f"{name!r} refuses its arguments: {error}", "correct `environment.args`") from error
    return V1Environment(name, loaders.load_environment(config), endpoint)


def _check_parts(loaders: Any, name: str) -> None:
    """Refuses what needs more than one chat, or a container."""
    task = loaders.task_type(name)
    if task.NEEDS_CONTAINER:
        remedy = "rewrite the task so that its tools are a Toolset, which runs as a process here"
        raise HostError(f"{name!r} needs a container, in which a program works without tool calls", remedy)
    if (harness := loaders.default_harness_id(name)) != "bash":
        remedy = "keep the tasks and rewards, and offer what the program does as a Toolset"
        raise HostError(f"{name!r} brings a harness of its own ({harness!r}), a program that runs the chat", remedy)
    single = importlib.import_module("verifiers.v1").SingleAgentEnvConfig
    if not issubclass(loaders.env_config_type(name), single):
        remedy = "export the taskset alone, or write the other agent as an interaction of mtrl's"
        raise HostError(f"{name!r} brings an environment with several agents; a rollout here is one chat", remedy)


class V1Environment:
    """One environment; a rollout's result is its episode."""

    def __init__(self, name: str, environment: Any, endpoint: ModelEndpoint) -> None:
        self.name, self.environment, self.endpoint = name, environment, endpoint
        self._stack = AsyncExitStack()
        self._tasks: list[Any] = []
        self._unread: Iterator[Any] = iter(environment.taskset)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.environment.serving())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    def about(self) -> dict[str, Any]:
        """What kind of environment this is."""
        return {"environment": self.name, "interface": "v1", "class": type(self.environment.taskset).__name__}

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """Tasks, which are read in order; a taskset may have no end."""
        if split != "train":
            raise HostError("a v1 taskset has no second data set", "leave `evaluation.data` out")
        self._read(start + count)
        return [
            _describe_task(task, str(number)) for number, task in enumerate(self._tasks[start : start + count], start)
        ]

    async def run(self, split: str, row: int, rollout: str) -> Any:
        """Runs an episode; the model's name tells the endpoint which rollout is asking."""
        verifiers: Any = importlib.import_module("verifiers.v1")
        client = verifiers.EvalClientConfig(base_url=self.endpoint.url, api_key_var=KEY_VARIABLE)
        self._read(row + 1)
        return await self.environment.run_episode(
            self._tasks[row], verifiers.ModelContext(model=rollout, client=client)
        )

    def describe(self, episode: Any) -> dict[str, Any]:
        """How an episode ended, and the error if there was one."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        failed = [error for error in errors if error.type != "ProviderError"]  # The policy wrote no more.
        stop = (episode.traces[-1].stop_condition if episode.traces else None) or ""
        return {"stop": stop, "error": f"{failed[-1].type}: {failed[-1].message}" if failed else ""}

    async def score(self, episodes: Sequence[Any]) -> list[dict[str, Any]]:
        """The rewards, which verifiers computes at the end of each episode."""
        return [_read_score(episode.traces[-1]) for episode in episodes]

    def _read(self, count: int) -> None:
        while len(self._tasks) < count and (task := next(self._unread, None)) is not None:
            self._tasks.append(task)


def _read_score(trace: Any) -> dict[str, Any]:
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        return {"reward": None, "metrics": {}, "error": f"{', '.join(unscored)} gave no reward"}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    return {"reward": trace.reward, "metrics": {**metrics, **scores}}


def _describe_task(task: Any, number: str) -> dict[str, Any]:
    """A task as a row; an answer is what its data calls one."""
    data = task.data.model_dump(mode="json", exclude_none=True)
    prompt = data.get("prompt", "")
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    system = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
    answer = {"answer": data["answer"]} if data.get("answer") not in (None, "") else {}
    return {"id": data.get("id") or number, "prompt": [*system, *chat], "info": data, **answer}
