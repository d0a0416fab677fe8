"""In the newer era a tool asks by returning: the client fills the request in and calls again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mcp_types as types
from everything.tools import Answer, Context, Run, Tool, elicitation, question, said, tool

Params = types.CallToolRequestParams | types.GetPromptRequestParams
WORDS: dict[str, Any] = {"type": "string"}


def filled(params: Params, key: str) -> Mapping[str, Any] | None:
    """What the user filled in under this key; None when there is no such answer yet."""
    answer = (params.input_responses or {}).get(key)
    return (answer.content or {}) if isinstance(answer, types.ElicitResult) else None


def ask(state: str | None = None, **requests: Any) -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests, request_state=state)


def name(message: str = "What are you called?") -> types.ElicitRequest:
    return elicitation(message, name=WORDS)


async def elicits(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Greets the user by name."""
    answer = filled(params, "user_name")
    return ask(user_name=name()) if answer is None else said(f"Hello, {answer.get('name', 'nobody')}!")


async def samples(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks the client's model for a capital."""
    answer = (params.input_responses or {}).get("capital_question")
    if not isinstance(answer, types.CreateMessageResult):
        return ask(capital_question=question("Which city is the capital of France?"))
    return said(f"The model says: {answer.content.text if answer.content.type == 'text' else answer.content.type}")


async def lists_roots(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Names the client's roots."""
    answer = (params.input_responses or {}).get("client_roots")
    if not isinstance(answer, types.ListRootsResult):
        return ask(client_roots=types.ListRootsRequest())
    return said(f"Roots: {', '.join(str(root.uri) for root in answer.roots)}")


def confirms(state: str) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        """Asks for a confirmation, and looks whether its state came back."""
        if filled(params, "confirm") is None or params.request_state != state:
            return ask(state, confirm=elicitation("Shall it be so?", ok={"type": "boolean"}))
        return said("state-ok")

    return run


async def asks_three(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks the user, the model and the client at once."""
    wanted = {"user_name": name(), "greeting": question("Greet me."), "client_roots": types.ListRootsRequest()}
    if wanted.keys() <= (params.input_responses or {}).keys():
        return said("All three have answered.")
    return ask("three", **wanted)


async def asks_again(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks for a name, then for a colour."""
    state: dict[str, Any] = json.loads(params.request_state or "{}")
    called, colour = filled(params, "step1"), filled(params, "step2")
    if "name" in state and colour is not None:
        return said(f"{state['name']} likes {colour.get('color')}.")
    if state and called is not None:
        return ask(
            json.dumps({"name": called.get("name")}),
            step2=elicitation("Step 2: which colour do you like?", color=WORDS),
        )
    return ask(json.dumps({"round": 1}), step1=name("Step 1: what are you called?"))


async def asks_what_it_may(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks only in the ways that the client has declared."""
    able = ctx.session.client_capabilities or types.ClientCapabilities()
    wanted: dict[str, Any] = {}
    if able.sampling is not None:
        wanted["sample"] = question("Say something.")
    if able.elicitation is not None:
        wanted["ask"] = name()
    return ask("able", **wanted) if wanted else said("The client can be asked nothing.")


def table() -> dict[str, Tool]:
    named = "test_input_required_result_"
    return dict(
        (
            tool(named + "elicitation", elicits),
            tool(named + "sampling", samples),
            tool(named + "list_roots", lists_roots),
            tool(named + "request_state", confirms("kept")),
            tool(named + "tampered_state", confirms("sealed")),
            tool(named + "multiple_inputs", asks_three),
            tool(named + "multi_round", asks_again),
            tool(named + "capabilities", asks_what_it_may),
            tool("test_streaming_elicitation", elicits),
        )
    )
