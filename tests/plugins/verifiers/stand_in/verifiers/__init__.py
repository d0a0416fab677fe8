"""A stand-in for v0 of `verifiers`, with as much of its interface as the samples use."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from . import clients, envs, types
from .clients import OverlongPromptError

__all__ = ["clients", "envs", "types"]


class Error(Exception):
    pass


class InfraError(Error):
    pass


def load_environment(name: str, **args: Any) -> Any:
    return importlib.import_module(name.replace("-", "_")).load_environment(**args)


async def call(function: Any, **given: Any) -> Any:
    """Calls a function with those arguments that it takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    result = function(**(given if takes_all else {name: given[name] for name in parameters if name in given}))
    return await result if inspect.isawaitable(result) else result


class Rubric:
    def __init__(self, funcs: Any = (), weights: Any = None) -> None:
        self.funcs = list(funcs)
        self.weights = list(weights or [1.0] * len(self.funcs))

    async def score_group(self, states: Any) -> None:
        for state in states:
            state["reward"], state["metrics"] = 0.0, {}
        for function, weight in zip(self.funcs, self.weights, strict=True):
            if "completions" in inspect.signature(function).parameters:
                scores = await call(function, completions=[state["completion"] for state in states], states=states)
            else:
                fields = ("prompt", "completion", "answer", "info")
                scores = [await call(function, state=s, **{name: s.get(name) for name in fields}) for s in states]
            for state, score in zip(states, scores, strict=True):
                state["metrics"][function.__name__] = score
                state["reward"] += weight * score

    async def cleanup(self, state: Any) -> None:
        state["cleaned"] = True


class Environment:
    def __init__(self, dataset: Any = None, eval_dataset: Any = None, system_prompt: str = "", **more: Any) -> None:
        self.dataset, self.eval_dataset, self.system_prompt = dataset, eval_dataset, system_prompt
        self.rubric = more.get("rubric") or Rubric()

    def _rows(self, rows: Any) -> Any:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [
            {"example_id": number, "prompt": [*system, {"role": "user", "content": row["question"]}], **row}
            for number, row in enumerate(rows)
        ]

    def get_dataset(self) -> Any:
        return self._rows(self.dataset)

    def get_eval_dataset(self) -> Any:
        return self._rows(self.eval_dataset or self.dataset)


class MultiTurnEnv(Environment):
    def __init__(self, max_turns: int = -1, **more: Any) -> None:
        super().__init__(**more)
        self.max_turns = max_turns
        self.tools: list[Any] = []

    async def setup_state(self, state: Any) -> None: ...

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        raise NotImplementedError

    def is_done(self, state: Any) -> str:
        if state["error"] is not None:
            return "has_error"
        if self.max_turns > 0 and len(state["trajectory"]) >= self.max_turns:
            return "max_turns_reached"
        return "has_final_env_response" if state.get("final_env_response") else ""

    async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:
        state = {**input, "trajectory": [], "error": None, "model": model}
        await self.setup_state(state)
        chat = list(state["prompt"])
        while not (stop := self.is_done(state)):
            try:
                if state["trajectory"]:
                    chat += await self.env_response(chat, state)
                    if state.get("final_env_response"):
                        continue
                state["trajectory"].append(reply := await client.complete(model, chat, self.tools))
                chat.append(reply)
            except OverlongPromptError:
                stop = "prompt_too_long"
                break
            except Error as error:
                state["error"] = error
        state["stop_condition"], state["completion"] = stop, chat[len(state["prompt"]) :]
        return state


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools: Any = (), max_turns: int = 10, **more: Any) -> None:
        super().__init__(max_turns=max_turns, **more)
        self.functions: dict[str, Any] = {}
        for tool in tools:
            self.add_tool(tool)

    def add_tool(self, tool: Any, args_to_skip: Any = ()) -> None:
        names = [name for name in inspect.signature(tool).parameters if name not in args_to_skip]
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
        function = {"name": tool.__name__, "description": tool.__doc__, "parameters": schema}
        self.tools.append({"type": "function", "function": function})
        self.functions[tool.__name__] = tool

    def is_done(self, state: Any) -> str:
        if state["trajectory"] and not state["trajectory"][-1].get("tool_calls"):
            return "no_tools_called"
        return super().is_done(state)

    def update_tool_args(self, name: str, args: Any, messages: Any, state: Any, **more: Any) -> Any:
        return args

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        answers = []
        for one in messages[-1]["tool_calls"]:
            try:
                name, args = one["function"]["name"], json.loads(one["function"]["arguments"])
                args = self.update_tool_args(name, args, messages, state)
                result = self.functions[name](**args)
                content = str(await result if inspect.isawaitable(result) else result)
            except Exception as error:
                content = str(error)
            answers.append({"role": "tool", "tool_call_id": one["id"], "content": content})
        return answers


class StatefulToolEnv(ToolEnv):
    pass
