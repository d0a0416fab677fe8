"""Runs episodes with `verifiers`' own runner against a scripted model, and prints chats, rewards and metrics as JSON.

    python verifiers_reference.py v0 shop_env < [[ROW, {"rollout-1": [{"content": "It is 6."}, ...], ...}], ...]

Each row has a group of rollouts. Runs with the Python that has verifiers. The model is an HTTP server in this process;
a request's `model` is a rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "SCRIPTED_MODEL_TOKEN"


class ScriptedModel(ThreadingHTTPServer):
    """Answers with the next turn of a rollout's script, and keeps the chat that it was shown."""

    def __init__(self, scripts: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scripts, self.turns, self.chats = scripts, Counter[str](), dict[str, Any]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["model"]
        turn = self.scripts[name][self.turns[name]]
        self.turns[name] += 1
        message = {"role": "assistant", **turn}
        self.chats[name] = [*body["messages"], message]
        return message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedModel

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = self.server.answer(body)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        common = {"id": "1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            choices = [{"index": 0, "delta": delta, "finish_reason": None}]
            last = [{"index": 0, "delta": {}, "finish_reason": reason}]
            chunks = [{"choices": choices}, {"choices": last}, {"choices": [], "usage": usage}]
            lines = [json.dumps({**common, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
            self._send("text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))
            return
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
        self._send("application/json", json.dumps(answer))

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


Groups = list[tuple[int, dict[str, Any]]]
"""Rows, each with the scripts of its rollouts by their names."""


async def run_v0(name: str, model: ScriptedModel, groups: Groups) -> list[dict[str, Any]]:
    """The rollouts of each group, scored together."""
    import verifiers as vf
    from verifiers.clients import resolve_client
    from verifiers.types import ClientConfig

    environment = vf.load_environment(name)
    client = resolve_client(ClientConfig(api_base_url=model.url, api_key_var=KEY, max_retries=0))
    results = []
    for number, scripts in groups:
        row = dict(environment.get_dataset()[number])
        states = [await environment.rollout(row, client, rollout, {}) for rollout in scripts]
        await environment.rubric.score_group(states)
        results += [
            {"reward": state["reward"], "metrics": state["metrics"], "stop": state["stop_condition"]}
            for state in states
        ]
    return results


async def run_v1(name: str, model: ScriptedModel, groups: Groups) -> list[dict[str, Any]]:
    """Episodes of each group's task with the `null` harness.

    Its program runs with this Python, so that nothing is installed.
    """
    import verifiers.v1 as vf
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    async def prepare(self: Any, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
        await self.write("program.py", script.encode() if isinstance(script, str) else script)
        return [sys.executable, "program.py"]

    SubprocessRuntime.prepare_uv_script = prepare
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = load_environment(resolve_env_config({"taskset": {"id": name}, "agent": agent}))
    client = vf.EvalClientConfig(base_url=model.url, api_key_var=KEY)
    tasks = [*environment.taskset]
    limit = asyncio.Semaphore(4)

    async def run(row: int, rollout: str) -> dict[str, Any]:
        async with limit:
            episode = await environment.run_episode(tasks[row], vf.ModelContext(model=rollout, client=client))
        trace = episode.traces[-1]
        rewards = {name: reward.score for name, reward in trace.rewards.items()}
        return {"reward": trace.reward, "metrics": {**trace.metrics, **rewards}, "stop": trace.stop_condition}

    async with environment.serving():
        return await asyncio.gather(*(run(row, rollout) for row, scripts in groups for rollout in scripts))


def main() -> None:
    interface, name = sys.argv[1:]
    os.environ[KEY] = "any"
    groups: Groups = json.load(sys.stdin)
    wire, _ = os.dup(1), os.dup2(2, 1)
    model = ScriptedModel({rollout: turns for _, scripts in groups for rollout, turns in scripts.items()})
    results = asyncio.run({"v0": run_v0, "v1": run_v1}[interface](name, model, groups))
    chats = [model.chats[rollout] for rollout in model.scripts]
    text = json.dumps([{**result, "chat": chat} for result, chat in zip(results, chats, strict=True)])
    with os.fdopen(wire, "w") as output:
        output.write(text)
    os._exit(0)


if __name__ == "__main__":
    main()
