"""Relative imports of files copied out of a package, such as `from .base_tool import BaseTool` in tools of verl.

A single file has no package. If it asks for one, its folder becomes one; what is not there is looked for in verl.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from zlib import crc32

_PREFIX = "copied_"
NEIGHBOURS: Mapping[str, str] = {
    "base": "verl.interactions.base",
    "base_tool": "verl.tools.base_tool",
    "geo3k_tool": "verl.tools.geo3k_tool",
    "gsm8k_interaction": "verl.interactions.gsm8k_interaction",
    "gsm8k_tool": "verl.tools.gsm8k_tool",
    "mcp_base_tool": "verl.tools.mcp_base_tool",
    "mcp_search_tool": "verl.tools.mcp_search_tool",
    "schemas": "verl.tools.schemas",
}
"""The modules that files of verl import relatively, by their last name."""


def import_user_module(name: str) -> ModuleType:
    """Imports a module; one that needs a package gets its folder as one."""
    try:
        return import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) or "no known parent package" not in str(error):
            raise
    return _import_as_member(name)


def _import_as_member(name: str) -> ModuleType:
    """Imports a single file as a member of a package that is its folder."""
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    folder = str(Path(spec.origin).parent)
    package = f"{_PREFIX}{crc32(folder.encode()):08x}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package, f"The files in {folder}.")
        sys.modules[package].__path__ = [folder]
    module = import_module(f"{package}.{name}")
    sys.modules[name] = module
    return module


class NeighbourFinder(MetaPathFinder, Loader):
    """Finds the neighbours of a copied file, after all other finders have failed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a neighbour, or None."""
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package.startswith(_PREFIX) and name in NEIGHBOURS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module in its own package, so that its classes are the same by both names."""
        module = import_module(NEIGHBOURS[spec.name.rpartition(".")[2]])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Puts back the module's own spec, which the import system has replaced."""
        if spec := module.__spec__:
            module.__spec__ = spec.loader_state


sys.meta_path.append(NeighbourFinder())
