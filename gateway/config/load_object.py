"""Loads the Python object that a configuration file names, such as `package.module:name`."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from gateway.config.diagnostics import closest_match
from gateway.config.entries import display_path
from gateway.errors import ConfigError, format_error, unwrap_error
from gateway.import_hook import NameNotOffered, add_to_sys_path, is_import_machinery
from gateway.plugins import enable_stand_ins
from gateway.relative_imports import import_user_module
from gateway.user_code import UserCode


def load_object(name: str, file: Path | None = None, field: str = "") -> Any:
    """Imports `package.module:name` or `package.module.name`; `file` and `field` are for error messages.

    The folder of `file` and the working folder are added to `sys.path` for good, because a module may import its
    neighbours later. The module can import the stand-ins of plug-ins for packages that are not installed, such as verl.
    """
    folders = [*([file.resolve().parent] if file else ()), Path.cwd()]
    add_to_sys_path(folders)
    module_name, _, attributes = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        with enable_stand_ins(module_name, folders), UserCode():
            target: Any = import_user_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # It imports what is missing.
            raise _import_error(module_name, error, file, field) from error
        searched = " or ".join(
            dict.fromkeys(str(display_path(folder)) for folder in (file.parent if file else Path(), Path.cwd()))
        )
        remedy = str(error) if isinstance(error, NameNotOffered) else f"install it, or put it into {searched}"
        raise ConfigError(f"there is no module {error.name!r}", file=file, field=field, remedy=remedy) from None
    except Exception as error:  # boundary: a user's module may raise anything
        raise _import_error(module_name, unwrap_error(error), file, field) from error
    for step in attributes.split("."):
        try:
            target = getattr(target, step)
        except AttributeError:
            _raise_missing_attribute(target, step, file, field)
        except NameNotOffered as error:
            problem = f"{target.__name__!r} has no {step!r}"
            raise ConfigError(problem, file=file, field=field, remedy=str(error)) from None
    return target


def _raise_missing_attribute(owner: ModuleType | type, step: str, file: Path | None, field: str) -> NoReturn:
    origin = getattr(owner, "__file__", None) or "built in"
    suggestion = closest_match(step, (known for known in dir(owner) if not known.startswith("_")))
    remedy = (
        f"did you mean {suggestion!r}?" if suggestion else "correct the name, or rename the module if it is another"
    )
    raise ConfigError(f"{owner.__name__!r} ({origin}) has no {step!r}", file=file, field=field, remedy=remedy)


def _import_error(module: str, error: BaseException, file: Path | None, field: str) -> ConfigError:
    """The error for a module whose import raised, with the user's line in the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_import_machinery(frame.filename)]
    location = f"{frames[-1].filename}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        location = f"{error.filename}:{error.lineno}"
    remedy = f"fix it at {location}"
    if isinstance(error, ModuleNotFoundError):
        missing = error.package if isinstance(error, NameNotOffered) else error.name
        remedy = f"install {missing}, or change what is imported at {location}"
    problem = f"importing {module!r} raised {format_error(error)} ({location})"
    return ConfigError(problem, file=file, field=field, remedy=remedy)
