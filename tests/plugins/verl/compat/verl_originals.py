"""verl 0.7.0's own modules from `.peers`, loaded beside the stand-ins, with stubs for what tests don't need."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

VERL = Path(__file__).parents[4] / ".peers" / "verl"
STUBS: dict[str, dict[str, Any]] = {
    "fastmcp": {},
    "fastmcp.exceptions": {"ClientError": type("ClientError", (Exception,), {})},
    "omegaconf": {"OmegaConf": None},
    "qwen_vl_utils": {"fetch_image": None, "fetch_video": None},
    "torch": {"Tensor": object},
    "verl.tools.utils.mcp_clients": {},
    # The wheel lacks this module, which the class only needs for calls.
    "verl.tools.utils.mcp_clients.McpClientManager": {"ClientManager": type("ClientManager", (), {})},
    "verl.utils.ray_utils": {"get_event_loop": None},
}


def load_originals(names: list[str]) -> dict[str, ModuleType]:
    """The modules by name. Packages are not initialized, since that would import all of verl."""
    assert VERL.is_dir(), f"{VERL} is missing: run `make peers`"
    before = dict(sys.modules)
    try:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
        for package in {parent for name in names for parent in _parents(name)} | {"verl.utils", "verl.tools.utils"}:
            sys.modules[package] = _module(package)
            sys.modules[package].__path__ = [str(VERL.joinpath(*package.split(".")[1:]))]
        for name, values in STUBS.items():
            sys.modules[name] = _module(name, **values)
        return {name: import_module(name) for name in names}
    finally:
        for name in {*sys.modules} - {*before}:
            del sys.modules[name]
        sys.modules.update(before)


def _parents(name: str) -> list[str]:
    steps = name.split(".")
    return [".".join(steps[:length]) for length in range(1, len(steps))]


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module
