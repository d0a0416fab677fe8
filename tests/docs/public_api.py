"""The public Python API: what users' files may import, by module."""

from __future__ import annotations

from collections.abc import Mapping

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "gateway.types": ("ToolSpec", "ToolCall", "ToolResult", "Outcome", "Text", "Image", "Audio", "Video", "Feedback"),
    "gateway.native.base": ("BaseTool", "ToolResponse", "OpenAIFunctionToolSchema"),
    "gateway.native.function": ("SessionContext",),
    "gateway.mcp_client.parse_hook": ("MCPBaseTool",),
    "gateway.feedback.base": ("BaseInteraction",),
    "gateway.media.process": ("process_image", "process_video"),
    "gateway.gateway": ("Gateway",),
    "gateway.client": ("RemoteGateway",),
    "trainer.ledger": ("Author", "Entry", "Ledger"),
    "trainer.rollout.task": ("Task",),
    "trainer.rollout.rollout": ("Rollout", "StopReason"),
    "trainer.reward.attempt": ("Attempt",),
    "trainer.rollout.steppers": ("ToolsAndFeedback", "ThinkAgain", "BackIntoThinking"),
    "mtrl_plugins.trl.api": ("GRPO", "GRPOConfig", "TrainOutput"),
}
