"""Tools written for TRL, functions and methods of environments, as tools of the gateway.

What the policy reads is what it reads there: the text of the returned value, or `{'error': ...}` for an exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from gateway.await_user_code import await_user_code
from gateway.config.models import Limits
from gateway.errors import ConfigError, describe_exception, error_text, unwrap_error
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.native.tool_results import to_tool_result
from gateway.policy_text import repeatable
from gateway.tool_table import Source
from gateway.toolset import Toolset
from gateway.types import Outcome, Text, ToolResult
from gateway.user_code import UserCode
from mtrl_plugins.trl.caller_thread import CallerThread, DeadlinePassed

CONTENT_TYPES = frozenset({"text", "image", "image_url", "video", "audio"})
"""Types of the blocks in a returned list that is shown as it is."""
NO_DEADLINE_S = 1e6
"""The gateway's own deadline, which would count the time in the queue of the caller's thread."""


class CallerTools:
    """Runs tools: synchronous ones on the caller's thread, or in threads if that is asked for; async ones directly."""

    def __init__(self, caller: CallerThread, timeout_s: float, *, in_threads: bool = False) -> None:
        self.caller, self.timeout_s, self.in_threads = caller, timeout_s, in_threads

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the same signature, which returns results as TRL would show them."""
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def wait(**kwargs: Any) -> ToolResult:
                try:
                    with UserCode():
                        return show_value(await await_user_code(function(**kwargs)))
                except Exception as error:  # user code: its exceptions are shown to the policy
                    return show_error(error)

            return wait

        @wraps(function)
        def call(**kwargs: Any) -> ToolResult:
            def show() -> ToolResult:
                with UserCode():
                    return show_value(function(**kwargs))

            try:
                result: ToolResult = self.run(show)
                return result
            except DeadlinePassed:  # Not the tool's own error: the rollout ends.
                raise
            except Exception as error:  # user code: as above
                return show_error(error)

        return call

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a synchronous function where such functions run. Raises DeadlinePassed if it takes too long."""
        if self.in_threads:
            return function(*args, **kwargs)
        return self.caller.call(function, self.timeout_s, *args, **kwargs)

    def limits(self, is_async: bool) -> Limits:
        """The limits of a tool. The caller's thread has its own deadline, which begins when the function does."""
        return Limits(timeout_s=self.timeout_s if is_async or self.in_threads else NO_DEADLINE_S)


def show_value(value: Any) -> ToolResult:
    """What a tool returned, as the policy reads it: blocks of content as they are, and any other value as text."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, list) and value and all(_is_block(item) for item in value):
        return to_tool_result(value)
    return ToolResult((Text(value if isinstance(value, str) else repeatable(str(value))),))


def show_error(error: Exception) -> ToolResult:
    """What a tool raised, as the policy reads it."""
    text = str({"error": repeatable(error_text(unwrap_error(error)))})
    return ToolResult((Text(text),), Outcome.ERROR, reason=f"raised {describe_exception(error)}")


def _is_block(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") in CONTENT_TYPES


def make_function_tools(functions: Sequence[Callable[..., Any]], tools: CallerTools) -> list[FunctionTool]:
    """The functions as tools. Raises ConfigError for what is no function."""
    made = []
    for index, function in enumerate(functions):
        if not callable(function) or isinstance(function, type):
            remedy = "pass functions, or the names of a gateway's folder and files"
            raise ConfigError(f"is a {type(function).__name__}", field=f"tools[{index}]", remedy=remedy)
        try:
            made.append(FunctionTool(tools.wrap(function), owner=f"tools[{index}]"))
        except (TypeError, NameError) as error:
            remedy = "give every parameter a name and a type hint"
            raise ConfigError(f"cannot be a tool: {error}", field=f"tools[{index}]", remedy=remedy) from error
    return made


def make_source(key: str, toolset: Toolset, tools: CallerTools, async_names: frozenset[str]) -> Source:
    """The toolset with its limits, for a gateway."""
    limited = LimitedToolset(toolset, lambda name: tools.limits(name in async_names))
    return Source(key, limited, admit=None)


def make_function_source(functions: Sequence[Callable[..., Any]], tools: CallerTools) -> Source:
    """A source with the functions."""
    made = make_function_tools(functions, tools)
    names = frozenset(tool.spec.name for tool in made if tool.is_async)
    return make_source("trl functions", NativeToolset(made), tools, names)
