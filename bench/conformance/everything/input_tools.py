"""Tools for modern protocol versions: they return input requests, and the client calls again with the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mcp_types as types
from everything.tools import Answer, Context, Run, Tool, answer_with, elicitation_request, sampling_request, tool

Params = types.CallToolRequestParams | types.GetPromptRequestParams
STRING: dict[str, Any] = {"type": "string"}


def get_answer(params: Params, key: str) -> Mapping[str, Any] | None:
    """The user's answer under this key; None if there is none yet."""
    answer = (params.input_responses or {}).get(key)
    return (answer.content or {}) if isinstance(answer, types.ElicitResult) else None


def require_input(state: str | None = None, **requests: Any) -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests, request_state=state)


def name_request(message: str = "What are you called?") -> types.ElicitRequest:
    return elicitation_request(message, name=STRING)


async def elicit(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Greets the user by name."""
    answer = get_answer(params, "user_name")
    return (
        require_input(user_name=name_request())
        if answer is None
        else answer_with(f"Hello, {answer.get('name', 'nobody')}!")
    )


async def sample(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks the client's model for a capital."""
    answer = (params.input_responses or {}).get("capital_question")
    if not isinstance(answer, types.CreateMessageResult):
        return require_input(capital_question=sampling_request("Which city is the capital of France?"))
    return answer_with(
        f"The model says: {answer.content.text if answer.content.type == 'text' else answer.content.type}"
    )


async def list_roots(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Names the client's roots."""
    answer = (params.input_responses or {}).get("client_roots")
    if not isinstance(answer, types.ListRootsResult):
        return require_input(client_roots=types.ListRootsRequest())
    return answer_with(f"Roots: {', '.join(str(root.uri) for root in answer.roots)}")


def confirm(state: str) -> Run:
    async def run(ctx: Context, params: types.CallToolRequestParams) -> Answer:
        """Asks for a confirmation, and checks that its state came back."""
        if get_answer(params, "confirm") is None or params.request_state != state:
            return require_input(state, confirm=elicitation_request("Shall it be so?", ok={"type": "boolean"}))
        return answer_with("state-ok")

    return run


async def ask_three(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks the user, the model and the client at once."""
    requests = {
        "user_name": name_request(),
        "greeting": sampling_request("Greet me."),
        "client_roots": types.ListRootsRequest(),
    }
    if requests.keys() <= (params.input_responses or {}).keys():
        return answer_with("All three have answered.")
    return require_input("three", **requests)


async def ask_twice(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks for a name, then for a colour."""
    state: dict[str, Any] = json.loads(params.request_state or "{}")
    name, color = get_answer(params, "step1"), get_answer(params, "step2")
    if "name" in state and color is not None:
        return answer_with(f"{state['name']} likes {color.get('color')}.")
    if state and name is not None:
        return require_input(
            json.dumps({"name": name.get("name")}),
            step2=elicitation_request("Step 2: which colour do you like?", color=STRING),
        )
    return require_input(json.dumps({"round": 1}), step1=name_request("Step 1: what are you called?"))


async def ask_by_capability(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Asks only in the ways that the client has declared."""
    capabilities = ctx.session.client_capabilities or types.ClientCapabilities()
    requests: dict[str, Any] = {}
    if capabilities.sampling is not None:
        requests["sample"] = sampling_request("Say something.")
    if capabilities.elicitation is not None:
        requests["ask"] = name_request()
    return require_input("able", **requests) if requests else answer_with("The client can be asked nothing.")


def build_table() -> dict[str, Tool]:
    prefix = "test_input_required_result_"
    return dict(
        (
            tool(prefix + "elicitation", elicit),
            tool(prefix + "sampling", sample),
            tool(prefix + "list_roots", list_roots),
            tool(prefix + "request_state", confirm("kept")),
            tool(prefix + "tampered_state", confirm("sealed")),
            tool(prefix + "multiple_inputs", ask_three),
            tool(prefix + "multi_round", ask_twice),
            tool(prefix + "capabilities", ask_by_capability),
            tool("test_streaming_elicitation", elicit),
        )
    )
