"""An import hook: users' files can import another package's names (such as verl's), for which mtrl has stand-ins.

The finder comes first in `sys.meta_path`, but ignores packages that are installed. It answers only to users' code:
while a configured class is loaded and, for imports inside methods, to code in the same folders and packages.

If the package is merely a clone in a folder that the configuration added to the path, its dependencies are often
missing, so only modules without a stand-in are imported from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module, invalidate_caches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_added_folders: set[str] = set()
"""Folders of users' files that were added to `sys.path`."""


def add_to_sys_path(folders: Iterable[Path]) -> None:
    """Appends folders to `sys.path`; at its end, so that no user's file shadows an installed library."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
            _added_folders.add(folder)
    invalidate_caches()


class NameNotOffered(ModuleNotFoundError):
    """A name of another package that mtrl has no stand-in for; the message says what to use instead."""

    package = ""
    """The package that would have to be installed."""


class StandInFinder(MetaPathFinder, Loader):
    """A `sys.meta_path` finder that provides stand-ins for one package's modules to users' code only."""

    def __init__(
        self,
        package: str,
        offered: Mapping[str, Mapping[str, str]],
        alternatives: Mapping[str, str],
        version: str,
    ) -> None:
        """`package` is the name to install; `offered` maps module -> name -> mtrl's `module:name`, and `alternatives`
        other names to what to use instead, of which the longest that matches counts."""
        self.package, self.offered, self.alternatives, self.version = package, offered, alternatives, version
        self.root = next(iter(offered)).partition(".")[0]
        self.folders: set[Path] = set()
        self.packages: set[str] = set()
        self._loading: ContextVar[bool] = ContextVar(f"loading what imports {self.root}", default=False)

    @contextmanager
    def enabled(self, module: str = "", folders: Iterable[Path] = ()) -> Iterator[None]:
        """Provides the names during the block, and later to `module`'s package and to code in `folders`."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        package = module.partition(".")[0]
        if package and package not in sys.stdlib_module_names:
            self.packages.add(package)
        self.folders.update(folder.resolve() for folder in folders)
        before = self._loading.set(True)
        try:
            yield
        finally:
            self._loading.reset(before)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.root or not (self._loading.get() or self._is_user_code(sys._getframe(1))):
            return None
        parent, _, name = fullname.rpartition(".")
        offered, in_stand_in = fullname in self.offered, isinstance(sys.modules.get(parent), _StandInModule)
        if not (offered and in_stand_in) and self._is_installed(fullname, path):
            return None
        if not offered:
            raise self.not_offered(fullname, fullname)
        spec = ModuleSpec(fullname, self, is_package=True)
        parents = filter(_added_folders.__contains__, sys.path) if path is None else path
        folders = [Path(folder, name) for folder in parents]
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec

    def _is_installed(self, fullname: str, path: Sequence[str] | None) -> bool:
        """Whether another finder finds the module, ignoring users' folders."""
        folders = [folder for folder in sys.path if folder not in _added_folders] if path is None else path
        others = (finder for finder in sys.meta_path if finder is not self)
        return any(finder.find_spec(fullname, folders) is not None for finder in others)

    def not_offered(self, name: str, module: str) -> NameNotOffered:
        """The error for a name without a stand-in."""
        names = self.offered.get(name.rpartition(".")[0]) or [one for one, names in self.offered.items() if names]
        matching = [known for known in self.alternatives if f"{name}.".startswith(f"{known}.")]
        instead = f"; instead: {self.alternatives[max(matching, key=len)]}" if matching else ""
        problem = f"{self.package} is not installed, and mtrl offers no {name} in its place{instead}"
        error = NameNotOffered(f"{problem}; offered: {', '.join(names)}", name=module)
        error.package = self.package
        return error

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        for name, target in self.offered[module.__name__].items():
            own_module, _, attribute = target.partition(":")
            setattr(module, name, getattr(import_module(own_module), attribute))
        if module.__name__ == self.root and self.version:
            module.__version__ = self.version  # type: ignore[attr-defined]

    def _is_user_code(self, frame: FrameType | None) -> bool:
        """Whether the importing code was loaded for a configuration, or lies in a folder or package of such code."""
        while frame is not None and is_import_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).partition(".")[0] in self.packages:
            return True
        file = Path(frame.f_code.co_filename)
        return not set(LIBRARY_FOLDERS) & set(file.parts) and any(
            file.is_relative_to(folder) for folder in self.folders
        )


class _StandInModule(ModuleType):
    """A module whose names are mtrl's own objects."""

    def __init__(self, name: str, finder: StandInFinder) -> None:
        super().__init__(name, f"Stands in for {name}.")
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or f"{self.__name__}.{name}" in self._finder.offered:
            raise AttributeError(name)  # The import system then looks for a module.
        raise self._finder.not_offered(f"{self.__name__}.{name}", self.__name__)


def is_import_machinery(file: str) -> bool:
    """Whether a file belongs to the import machinery, so that the importing code is further up the stack."""
    return "importlib" in file or file == __file__
