"""The adapter of `verifiers` in a host process: finds an environment by name, of the v0 or of the v1 interface.

Runs with the Python that has `verifiers`. v0 (`load_environment`) is in its releases up to 0.3.1; of v1 (tasksets),
the interface of 0.4 is served.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gateway.process.child_entry import load_file

if TYPE_CHECKING:
    from mtrl_plugins.environments.host_server import HostError, ModelEndpoint
else:
    from host_server import HostError


def load(environment: str, args: dict[str, Any], endpoint: ModelEndpoint) -> Any:
    """The environment of a module; names of the Environments Hub (`owner/name@version`) are those of their modules."""
    remedy = "install it there (`pip install verifiers`), or name another Python as `environment.python`"
    _require("verifiers", f"{sys.executable} has no verifiers", remedy)
    module = _import_module(environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_"), environment)
    if callable(getattr(module, "load_environment", None)):
        problem = f"{environment!r} has `load_environment`, which verifiers {about()} no longer knows"
        remedy = "install a release that has it there: `pip install verifiers==0.3.1`"
        _require("verifiers.envs.multiturn_env", problem, remedy)
        return _interface("v0_environment").load(module, environment, args, endpoint)
    if getattr(module, "__all__", None):
        problem = f"{environment!r} is a taskset, which this release of verifiers does not know ({about()})"
        remedy = "install one that does there: `pip install 'verifiers>=0.4.0'`"
        _require("verifiers.v1.harnesses.utils", problem, remedy)
        return _interface("v1_environment").load(module, environment, args, endpoint)
    remedy = "define load_environment(**args), or name a Taskset in `__all__`"
    raise HostError(f"{environment!r} has neither `load_environment` nor a taskset", remedy)


def about() -> str:
    """The release of verifiers."""
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return "unknown"


def _require(module: str, problem: str, remedy: str) -> None:
    """Raises HostError if this Python's verifiers has no such module."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise HostError(f"{problem} ({error})", remedy) from error


def _import_module(name: str, environment: str) -> ModuleType:
    for candidate in (f"verifiers.v1.tasksets.{name}", name):
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is None or not candidate.startswith(error.name):
                remedy = "install it there, or the release of verifiers that the environment was written for"
                raise HostError(f"{environment!r} needs {error.name}, which {sys.executable} lacks", remedy) from error
    remedy = f"install the environment there, or put {name}.py into the folder where the run starts"
    raise HostError(f"{sys.executable} has no environment {environment!r} (a module {name})", remedy)


def _interface(name: str) -> Any:
    return load_file(f"host_{name}", Path(__file__).with_name(f"{name}.py"))
