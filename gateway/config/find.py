"""A name in a file becomes the Python object that it names, or one message that says why it cannot."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from gateway.config.entries import shown
from gateway.config.mistakes import nearest
from gateway.errors import ConfigError
from gateway.standing import Absent, is_machinery, look_in
from gateway.verl.importing import standing_in


def find(name: str, near: Path | None = None, field: str = "") -> Any:
    """The object behind `package.module:name` or `package.module.name`; `near` and `field` say who names it.

    The folder of `near`, and then the working folder, join `sys.path` and stay there, because a module may import its
    neighbours later. Names of verl's are there for what is loaded, where no verl is installed.
    """
    folders = [*([near.resolve().parent] if near else ()), Path.cwd()]
    look_in(folders)
    module_name, attributes = _parted(name)
    try:
        with standing_in(module_name, folders):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not _is_absent(module_name, error):
            raise _raised(module_name, error, near, field) from error
        places = " or ".join(dict.fromkeys(str(shown(one)) for one in (near.parent if near else Path(), Path.cwd())))
        remedy = str(error) if isinstance(error, Absent) else f"install it, or put it into {places}"
        raise ConfigError(f"there is no module {error.name!r}", file=near, field=field, remedy=remedy) from None
    except (Exception, SystemExit) as error:  # boundary: a user's module may raise anything, and a script may end
        raise _raised(module_name, error, near, field) from error
    for step in attributes.split("."):
        try:
            found = getattr(found, step)
        except AttributeError:
            _lacks(found, step, near, field)
        except Absent as error:
            problem = f"{found.__name__!r} has no {step!r}"
            raise ConfigError(problem, file=near, field=field, remedy=str(error)) from None
    return found


def _parted(name: str) -> tuple[str, str]:
    module, _, attributes = name.partition(":") if ":" in name else name.rpartition(".")
    return module, attributes


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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_machinery(frame.filename)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    remedy = f"mend it at {place}"
    if isinstance(error, ModuleNotFoundError):
        lacking = error.package if isinstance(error, Absent) else error.name
        remedy = f"install {lacking}, or change what is imported at {place}"
    problem = f"importing {module!r} raised {type(error).__name__}: {error} ({place})"
    return ConfigError(problem, file=near, field=field, remedy=remedy)
