"""One table says what stands in for verl: a name that is not in it is refused with those that are."""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.7.1"
"""The last release with MCP tools and interactions, whose interface this is."""
_OURS = "gateway.verl"
_SCHEMAS = (
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionToolCall",
)
_SCHEMA = {name: f"gateway.native.base:{name}" for name in ("OpenAIFunctionSchema", "OpenAIFunctionToolSchema")}
_RESPONSE = {"ToolResponse": "gateway.native.base:ToolResponse"}
_TOOLS_FROM = {"initialize_tools_from_config": f"{_OURS}.registry:initialize_tools_from_config"}

OFFERED: Mapping[str, Mapping[str, str]] = {
    "verl": {},
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": f"{_OURS}.base:BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": "gateway.feedback.gsm8k:Gsm8kInteraction"},
    "verl.interactions.utils": {},
    "verl.interactions.utils.interaction_registry": {
        "initialize_interactions_from_config": f"{_OURS}.registry:initialize_interactions_from_config",
        "get_interaction_class": f"{_OURS}.registry:named_class",
    },
    "verl.tools": {},
    # Until 0.5 the registry stood beside the base class.
    "verl.tools.base_tool": {"BaseTool": f"{_OURS}.base:BaseTool", **_SCHEMA, **_RESPONSE, **_TOOLS_FROM},
    "verl.tools.schemas": {name: f"{_OURS}.schemas:{name}" for name in _SCHEMAS} | _SCHEMA | _RESPONSE,
    "verl.tools.gsm8k_tool": {"Gsm8kTool": "gateway.native.gsm8k:Gsm8kTool"},
    "verl.tools.mcp_base_tool": {"MCPBaseTool": "gateway.upstream.hook:MCPBaseTool"},
    "verl.tools.mcp_search_tool": {"MCPSearchTool": "gateway.upstream.hook:MCPBaseTool"},
    "verl.tools.utils": {},
    "verl.tools.utils.tool_registry": {
        **_TOOLS_FROM,
        "get_tool_class": f"{_OURS}.registry:named_class",
        "ToolType": f"{_OURS}.registry:ToolType",
    },
    "verl.utils": {},
    "verl.utils.dataset": {},
    "verl.utils.dataset.vision_utils": {
        "process_image": "gateway.media.process:process_image",
        "process_video": "gateway.media.process:process_video",
    },
    "verl.utils.reward_score": {"default_compute_score": f"{_OURS}.reward_score:default_compute_score"},
    "verl.utils.reward_score.gsm8k": {
        "compute_score": "gateway.feedback.score:compute_score",
        "extract_solution": "gateway.feedback.score:extract_solution",
    },
    "verl.utils.rollout_trace": {
        "rollout_trace_op": f"{_OURS}.traced:rollout_trace_op",
        "rollout_trace_attr": f"{_OURS}.traced:rollout_trace_attr",
    },
}
"""Module -> name -> the object of ours behind it."""

INSTEAD: Mapping[str, str] = {
    "verl.DataProto": "a reward function is given one attempt here (README, Rewards)",
    "verl.protocol": "a reward function is given one attempt here (README, Rewards)",
    "verl.experimental.agent_loop": "what stands between two turns is a plug-in: the setting `stepper`",
    "verl.experimental.dataset": "the order of tasks is the setting `curriculum`",
    "verl.interactions.weather_interaction": "copy it beside your configuration, and name it there",
    "verl.tools.sandbox_fusion_tools": "run the sandbox as an MCP server, or see gateway.feedback.code",
    "verl.tools.search_tool": "run the search as an MCP server",
    "verl.tools.image_zoom_in_tool": "copy it beside your configuration, and name it there",
    "verl.tools.geo3k_tool": "copy it beside your configuration, and name it there",
    "verl.tools.utils.mcp_clients": "the gateway opens MCP servers itself; override `_parse_tool_result`",
    "verl.utils.reward_score": "bring the scoring function in a file of yours",
    "verl.workers": "a reward is a function here: the setting `reward`",
}
"""What verl had and mtrl does otherwise; the longest name that fits speaks."""


def refusal(name: str) -> str:
    """What whoever asked for the name is told."""
    here = ", ".join(f"{module} ({', '.join(names)})" for module, names in OFFERED.items() if names)
    fits = [known for known in INSTEAD if f"{name}.".startswith(f"{known}.")]
    instead = f"; instead: {INSTEAD[max(fits, key=len)]}" if fits else ""
    return f"verl is not installed, and {name} is not among what mtrl offers in its place{instead}; offered: {here}"
