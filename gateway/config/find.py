"""A name in a file becomes the Python object that it names, or one message that says why it cannot."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from gateway.config.entries import shown
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
"""Classes that verl 0.7 shipped, and ours that behave like them: used where no verl that has them is installed."""


def find(name: str, near: Path | None = None, field: str = "") -> Any:
    """The object behind `package.module:name` or `package.module.name`; `near` and `field` say who names it.

    The folder of `near`, and then the working folder, join the end of `sys.path` and stay there, because a module
    may import its neighbours later. At the end, so that no file of a user stands in for an installed library.
    """
    _look_in([near.resolve().parent] if near else [])
    module_name, attributes = _parted(name)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not _is_absent(module_name, error):
            raise _raised(module_name, error, near, field) from error
        if ours := VERL.get(name.replace(":", ".")):
            return find(ours, near, field)
        folders = " or ".join(dict.fromkeys(str(shown(one)) for one in (near.parent if near else Path(), Path.cwd())))
        remedy = f"install it, or put it into {folders}"
        raise ConfigError(f"there is no module {error.name!r}", file=near, field=field, remedy=remedy) from None
    except (Exception, SystemExit) as error:  # boundary: a user's module may raise anything, and a script may end
        raise _raised(module_name, error, near, field) from error
    for step in attributes.split("."):
        if not hasattr(found, step):
            _lacks(found, step, near, field)
        found = getattr(found, step)
    return found


def _parted(name: str) -> tuple[str, str]:
    module, _, attributes = name.partition(":") if ":" in name else name.rpartition(".")
    return module, attributes


def _look_in(folders: list[Path]) -> None:
    for folder in (*folders, Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    importlib.invalidate_caches()


def _is_absent(module: str, error: ModuleNotFoundError) -> bool:
    """Whether it is the module itself that is not there, and not something that it imports."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def _lacks(found: ModuleType | type, step: str, near: Path | None, field: str) -> NoReturn:
    place = getattr(found, "__file__", None) or "built in"
    near_miss = nearest(step, (known for known in dir(found) if not known.startswith("_")))
    remedy = f"did you mean {near_miss!r}?" if near_miss else "correct the name, or rename the module if it is another"
    raise ConfigError(f"{found.__name__!r} ({place}) has no {step!r}", file=near, field=field, remedy=remedy)


def _raised(module: str, error: Exception | SystemExit, near: Path | None, field: str) -> ConfigError:
    """The last line of the user's own traceback, and where it points."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    remedy = f"mend it at {place}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "verl":
        remedy = "install verl, or import the class from here: " + ", ".join(sorted(set(VERL.values())))
    problem = f"importing {module!r} raised {type(error).__name__}: {error} ({place})"
    return ConfigError(problem, file=near, field=field, remedy=remedy)
