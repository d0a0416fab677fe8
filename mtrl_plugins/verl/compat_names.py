"""The table of verl's names that users' files can import where verl is not installed, and the import hook for them.

Other names are refused with a text that lists those offered and what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.import_hook import StandInFinder

VERSION = "0.7.1"
"""The release whose interface this is: the last one with MCP tools and interactions."""
_PACKAGE = "mtrl_plugins.verl"
_SCHEMA_NAMES = (
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionToolCall",
)
_NATIVE_SCHEMAS = {name: f"gateway.native.base:{name}" for name in ("OpenAIFunctionSchema", "OpenAIFunctionToolSchema")}
_RESPONSE = {"ToolResponse": "gateway.native.base:ToolResponse"}
_TOOL_LOADER = {"initialize_tools_from_config": f"{_PACKAGE}.registry:initialize_tools_from_config"}

OFFERED: Mapping[str, Mapping[str, str]] = {
    "verl": {},
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": f"{_PACKAGE}.base:BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": f"{_PACKAGE}.gsm8k_rule:Gsm8kInteraction"},
    "verl.interactions.utils": {},
    "verl.interactions.utils.interaction_registry": {
        "initialize_interactions_from_config": f"{_PACKAGE}.registry:initialize_interactions_from_config",
        "get_interaction_class": f"{_PACKAGE}.registry:load_class",
    },
    "verl.tools": {},
    # verl 0.5 and earlier have the registry in this module.
    "verl.tools.base_tool": {"BaseTool": f"{_PACKAGE}.base:BaseTool", **_NATIVE_SCHEMAS, **_RESPONSE, **_TOOL_LOADER},
    "verl.tools.schemas": {name: f"{_PACKAGE}.base:{name}" for name in _SCHEMA_NAMES} | _NATIVE_SCHEMAS | _RESPONSE,
    "verl.tools.gsm8k_tool": {"Gsm8kTool": f"{_PACKAGE}.gsm8k_rule:Gsm8kTool"},
    "verl.tools.mcp_base_tool": {"MCPBaseTool": f"{_PACKAGE}.base:MCPBaseTool"},
    "verl.tools.mcp_search_tool": {"MCPSearchTool": f"{_PACKAGE}.base:MCPSearchTool"},
    "verl.tools.utils": {},
    "verl.tools.utils.tool_registry": {
        **_TOOL_LOADER,
        "get_tool_class": f"{_PACKAGE}.registry:load_class",
        "ToolType": f"{_PACKAGE}.registry:ToolType",
    },
    "verl.utils": {},
    "verl.utils.dataset": {},
    "verl.utils.dataset.vision_utils": {
        "process_image": f"{_PACKAGE}.base:process_image",
        "process_video": "gateway.media.process:process_video",
    },
    "verl.utils.reward_score": {"default_compute_score": f"{_PACKAGE}.registry:default_compute_score"},
    "verl.utils.reward_score.gsm8k": {
        name: f"{_PACKAGE}.gsm8k_rule:{name}" for name in ("compute_score", "extract_solution")
    },
    "verl.utils.reward_score.geo3k": {
        name: f"{_PACKAGE}.geo3k_rule:{name}" for name in ("compute_score", "acc_reward", "format_reward")
    },
    "verl.utils.rollout_trace": {
        "rollout_trace_op": f"{_PACKAGE}.base:rollout_trace_op",
        "rollout_trace_attr": f"{_PACKAGE}.base:rollout_trace_attr",
    },
}
"""verl's module -> name -> the object that it imports, as `module:name`."""

ALTERNATIVES: Mapping[str, str] = {
    "verl.DataProto": "a reward function gets one attempt (docs/rewards.md)",
    "verl.protocol": "a reward function gets one attempt (docs/rewards.md)",
    "verl.experimental.agent_loop": "the code between two turns is a plug-in: the setting `stepper`",
    "verl.experimental.dataset": "the order of tasks is the setting `curriculum`",
    "verl.interactions.weather_interaction": "copy the file next to your configuration, and name the class there",
    "verl.tools.sandbox_fusion_tools": "run the sandbox as an MCP server, or see gateway.feedback.code",
    "verl.tools.search_tool": "run the search as an MCP server",
    "verl.tools.utils.search_r1_like_utils": (
        "copy the file next to your configuration, import it from there, and `pip install ray` for its pools"
    ),
    "verl.tools.image_zoom_in_tool": "copy the file next to your configuration, and name the class there",
    "verl.tools.geo3k_tool": "copy the file next to your configuration, and name the class there",
    "verl.tools.utils.mcp_clients": "the gateway opens MCP servers itself; override `_parse_tool_result`",
    "verl.utils.reward_score.sandbox_fusion": "run the sandbox as an MCP server, or see gateway.feedback.code",
    "verl.utils.reward_score": "put the scoring function into a file of your own",
    "verl.workers": "rewards are functions: the setting `reward`",
}
"""What to use instead of other names of verl; the longest matching name counts."""

FINDER = StandInFinder("verl", OFFERED, ALTERNATIVES, VERSION)
