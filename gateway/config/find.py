"""A name in a file becomes the Python object that it names, or one message that says why it cannot."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gateway.config.mistakes import nearest
from gateway.errors import ConfigError

VERL = {
    "verl.interactions.base.BaseInteraction": "gateway.feedback.base:BaseInteraction",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gateway.feedback.gsm8k:Gsm8kInteraction",
    "verl.tools.base_tool.BaseTool": "gateway.native.base:BaseTool",
    "verl.tools.gsm8k_tool.Gsm8kTool": "gateway.native.gsm8k:Gsm8kTool",
    "verl.tools.mcp_base_tool.MCPBaseTool": "gateway.upstream.hook:MCPBaseTool",
    "verl.tools.mcp_search_tool.MCPSearchTool": "gateway.upstream.hook:MCPBaseTool",
}
"""Classes that verl 0.7 shipped, and ours that behave like them: used where verl is not installed."""


def find(name: str, near: Path | None = None) -> Any:
    """The object behind `package.module:name` or `package.module.name`.

    `near` is the file that names it: its folder, then the working folder, can be imported from while this runs.
    They come after what is installed, so that a file of a user never stands in for a library.
    """
    name = _ours(name)
    module_name, _, attributes = name.partition(":") if ":" in name else _parted(name)
    with _importable(near):
        found: Any = _module(module_name, near)
    for step in attributes.split("."):
        if not hasattr(found, step):
            public = [known for known in dir(found) if not known.startswith("_")]
            close = nearest(step, public)
            remedy = f"did you mean {close!r}?" if close else "correct the name after the module"
            raise ConfigError(f"{name!r}: {module_name} has no {step!r}", file=near, remedy=remedy)
        found = getattr(found, step)
    return found


def _parted(name: str) -> tuple[str, str, str]:
    module, dot, attribute = name.rpartition(".")
    return module, dot, attribute


def _ours(name: str) -> str:
    ours = VERL.get(name.replace(":", "."))
    return ours if ours and importlib.util.find_spec("verl") is None else name


@contextmanager
def _importable(near: Path | None) -> Iterator[None]:
    folders = [str(folder) for folder in ([near.resolve().parent] if near else []) + [Path.cwd()]]
    added = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    sys.path.extend(added)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def _module(name: str, near: Path | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            folders = " and ".join(dict.fromkeys(str(folder) for folder in ((near.parent if near else Path()), Path())))
            remedy = f"install it, or put it into one of the folders that are looked into: {folders}"
            raise ConfigError(f"there is no module {error.name!r}", file=near, remedy=remedy) from None
        raise _raised(name, error, near) from error
    except Exception as error:  # boundary: a user's module may raise anything when it is imported
        raise _raised(name, error, near) from error


def _raised(name: str, error: Exception, near: Path | None) -> ConfigError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its import"
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return ConfigError(f"importing {name!r} raised {last} ({place})", file=near, remedy=f"mend it at {place}")
