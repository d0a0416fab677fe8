"""Environments of verifiers' v0 interface (`load_environment`), run by their own `rollout` and scored by their rubric.

Runs in a host process, with the Python that has `verifiers`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mtrl_plugins.environments.host_server import HostError, ModelEndpoint
else:
    from host_server import HostError

KEY_VARIABLE = "MTRL_POLICY_TOKEN"
POLICY_ERRORS = ("ModelError", "OverlongPromptError", "ToolError")
"""Errors of a rollout that are the policy's doing; such a rollout is scored, as verifiers does."""


def load(module: ModuleType, name: str, args: dict[str, Any], endpoint: ModelEndpoint) -> V0Environment:
    """The environment that the module's `load_environment` makes."""
    verifiers: Any = importlib.import_module("verifiers")
    environment = verifiers.load_environment(name, **args)
    ancestors = {ancestor.__name__ for ancestor in type(environment).__mro__}
    if "MultiTurnEnv" not in ancestors and "EnvGroup" not in ancestors:
        remedy = "derive it from MultiTurnEnv, ToolEnv or SingleTurnEnv"
        raise HostError(f"{name!r} is a {type(environment).__name__}, which runs its rollouts in its own way", remedy)
    return V0Environment(name, environment, endpoint)


class V0Environment:
    """One environment; a rollout's result is its state."""

    def __init__(self, name: str, environment: Any, endpoint: ModelEndpoint) -> None:
        self.name, self.environment, self.endpoint = name, environment, endpoint
        self._data: dict[str, Any] = {}
        self._client: Any = None

    async def __aenter__(self) -> Self:
        types, clients = importlib.import_module("verifiers.types"), importlib.import_module("verifiers.clients")
        config = types.ClientConfig(
            api_base_url=self.endpoint.url, api_key_var=KEY_VARIABLE, timeout=10**6, max_retries=0
        )
        self._client = clients.resolve_client(config)
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._client is not None:
            await self._client.close()

    def about(self) -> dict[str, Any]:
        """What kind of environment this is."""
        return {"environment": self.name, "interface": "v0", "class": type(self.environment).__name__}

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """Rows of the data set `train` or `eval`."""
        data = self._dataset(split)
        return [self._describe_row(data[number]) for number in range(start, min(start + count, len(data)))]

    async def run(self, split: str, row: int, rollout: str) -> Any:
        """Runs a rollout; the model's name tells the endpoint which one is asking."""
        return await self.environment.rollout(dict(self._dataset(split)[row]), self._client, rollout, {})

    def describe(self, state: Any) -> dict[str, Any]:
        """How a rollout ended, and the infrastructure's error if there was one."""
        error = state.get("error")
        kinds = {ancestor.__name__ for ancestor in type(error).__mro__}
        is_infrastructure = error is not None and not kinds.intersection(POLICY_ERRORS)
        stop = state.get("stop_condition") or ""
        return {"stop": stop, "error": f"{type(error).__name__}: {error}" if is_infrastructure else ""}

    async def score(self, states: Sequence[Any]) -> list[dict[str, Any]]:
        """The rubric's scores of a group."""
        await self.environment.rubric.score_group(list(states))
        for state in states:
            await self.environment.rubric.cleanup(state)
        return [{"reward": state["reward"], "metrics": dict(state["metrics"] or {})} for state in states]

    def _dataset(self, split: str) -> Any:
        if split not in self._data:
            get = self.environment.get_eval_dataset if split == "eval" else self.environment.get_dataset
            self._data[split] = get()
        return self._data[split]

    def _describe_row(self, row: dict[str, Any]) -> dict[str, Any]:
        info = row.get("info")
        info = json.loads(info) if isinstance(info, str) and info else info
        kind = str(row.get("env_id") or row.get("task") or "")
        answer = {"answer": row["answer"]} if row.get("answer") not in (None, "") else {}
        return {"id": str(row.get("example_id")), "prompt": row.get("prompt"), "kind": kind, "info": info, **answer}
