"""verl's registries: interactions and native tools of a YAML file, classes by name, and the score by data source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from gateway.config.load import Config, load_config
from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from gateway.feedback.base import BaseInteraction
from gateway.feedback.interaction_toolset import build_interactions
from gateway.native.base import BaseTool
from mtrl_plugins.verl import geo3k_rule, gsm8k_rule


class ToolType(Enum):
    """verl's kinds of tools."""

    NATIVE = "native"
    MCP = "mcp"


def load_class(cls_name: str, file: Path | None = None, field: str = "") -> Any:
    """The class `package.module.Class`. Raises what verl raises: ModuleNotFoundError, ImportError or AttributeError."""
    try:
        return load_object(cls_name, file, field)
    except ConfigError as error:
        origin = error.__context__
        kinds: tuple[type[Exception], ...] = (AttributeError, ModuleNotFoundError, ImportError)
        kind = next((kind for kind in kinds if isinstance(origin, kind)), ImportError)
        raise kind(str(error)) from error


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, BaseInteraction]:
    """The interactions of a file by name; the default name is the class's in lower case, without `Interaction`."""
    try:
        return build_interactions(_load_file(interaction_config_file).interactions, load_class)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool]:
    """The native tools of a file; MCP servers need a rollout's session, which the gateway opens."""
    from gateway.build import build_class_tool
    from gateway.config.entries import ClassEntry

    config = _load_file(tools_config_file)
    if config.servers:
        remedy = "open a session on `gateway.Gateway.load(file)`, which includes them"
        raise NotImplementedError(f"{tools_config_file}: MCP tools need a rollout's session; {remedy}")
    return [build_class_tool(entry) for entry in config.tools if isinstance(entry, ClassEntry)]


def _load_file(file: str | Path) -> Config:
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        return load_config(path, None)
    except ConfigError as error:
        raise ValueError(str(error)) from error


SCORES: Mapping[str, Callable[[str, Any], float]] = {
    "openai/gsm8k": gsm8k_rule.compute_score,
    "hiyouga/geometry3k": geo3k_rule.compute_score,
}
"""The rules by data source that come with mtrl; they score as verl's own."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float:
    """The score of the data source's own rule; raises NotImplementedError for unknown sources."""
    if data_source not in SCORES:
        raise NotImplementedError(
            f"no reward function for data_source={data_source!r} comes with mtrl, only for {', '.join(SCORES)}; "
            "set your own: custom_reward_function.path"
        )
    return float(SCORES[data_source](solution_str, ground_truth))
