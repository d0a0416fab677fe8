"""A harness for agents: an endpoint with a scripted policy, played by functions, programs, or requests of the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2

from gateway.session import AnyGateway
from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.agent_runner import AgentRunner
from mtrl_plugins.agents.agent_session import AgentSession, RolloutIdentity
from mtrl_plugins.agents.settings import AgentSettings
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, QUESTION, encode_turns, make_gateway
from tests.waiting import PATIENCE_S
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.parse.hermes import Hermes
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task

TEMPLATE = make_template(HERMES, parser=Hermes())
TASK = Task("t", QUESTION, truth="7", columns={"question": "What is 3 + 4?", "ground_truth": "7"})
Policy = Callable[[str], str]
"""What the policy writes after a prompt's text."""


def script(policy: Policy | Sequence[str]) -> Callable[[Sequence[int], Sampling, str], Answer]:
    """A scripted policy: a function of the prompt, or turns one after the other."""
    turns = None if callable(policy) else iter(policy)

    def answer(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        text = policy(TEMPLATE.tokenizer.decode(ids)) if callable(policy) else next(turns)  # type: ignore[arg-type]
        return encode_turns(TEMPLATE, text)[0]

    return answer


@dataclass
class AgentHarness:
    """A runner with its endpoint and engine."""

    runner: AgentRunner
    engine: ScriptedEngine
    host: AgentHost

    async def run(self, task: Task = TASK) -> Rollout:
        """One rollout, with the laws that hold for each."""
        rollout = await self.runner.run(task, group="0-0-0")
        check_laws(rollout, self.engine)
        return rollout

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Requests]:
        """A session that the test itself plays."""
        session = AgentSession(self.runner, self.host.settings, RolloutIdentity("key", "group"))
        session.opening = {"task": {"id": "t", "prompt": "What is 3 + 4?"}}
        with self.host.open(session):
            url = self.host.endpoint.base_url(session)
            async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                yield Requests(client, session)


@dataclass
class Requests:
    """Requests to one session."""

    client: httpx2.AsyncClient
    session: AgentSession

    async def post(self, path: str, body: Mapping[str, Any], key: str | None = None) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {self.session.api_key if key is None else key}"}
        return await self.client.post(path, json=body, headers=headers)

    async def chat(self, messages: Sequence[Any], **body: Any) -> dict[str, Any]:
        """The message that Chat Completions gives."""
        response = await self.post("/chat/completions", {"model": "policy", "messages": list(messages), **body})
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message


@asynccontextmanager
async def open_agents(
    policy: Policy | Sequence[str],
    *tools: Callable[..., Any],
    limits: RolloutLimits | None = None,
    gateway: AnyGateway | None = None,
    **settings: Any,
) -> AsyncIterator[AgentHarness]:
    """A harness with an agent of these settings; by default one that a test plays."""
    engine = ScriptedEngine(script(policy))
    agent = AgentSettings(**(settings or {"external": True}))
    with anyio.fail_after(2 * PATIENCE_S):
        async with gateway or make_gateway(*tools) as opened, AgentHost(agent) as host:
            runner = AgentRunner(engine, TEMPLATE, opened, limits or RolloutLimits(), host=host)
            yield AgentHarness(runner, engine, host)


def check_laws(rollout: Rollout, engine: ScriptedEngine) -> None:
    """Every ledger's beginning up to a turn is what the engine was sent, and each sampled token is trained once."""
    prompts = {request.ids for request in engine.requests}
    for ledger in rollout.ledgers:
        for index, entry in enumerate(ledger.entries):
            if entry.author == "policy":
                assert ledger.ids[: ledger.starts[index]] in prompts
    seen = rollout.infos["agent"]
    trained = sum(sum(ledger.mask) for ledger in rollout.ledgers)
    assert seen["sampled"] == trained + seen["discarded"] and seen["retokenised"] == 0


def call_text(name: str, arguments: str) -> str:
    """A call in the template's format, with its arguments as they are."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "What is 3 + 4?"}
CALL = call_text("add", '{"a":3,   "b": 4}')


def tool_reply(message: dict[str, Any], text: str = "7", index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][index]["id"], "content": text}


def read_events(text: str) -> list[dict[str, Any]]:
    """The JSON of each server-sent event, without comments; the event's name, where it has one, is its type."""
    events = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.strip().splitlines())
        if fields.get("data", "[DONE]") == "[DONE]":
            continue
        event = json.loads(fields["data"])
        assert fields.get("event", event.get("type")) == event.get("type")
        events.append(event)
    return events
