"""Another package's names can be imported by the files that a configuration names, now and later, and by nobody else.

A finder stands first in `sys.meta_path`, and lets everything pass that is installed, or was on the path. It answers
while a class is being loaded; afterwards, for imports inside methods, to code of the same folders and packages.

A package of that name in a folder which only a configuration put on the path, such as a clone of it where the command
was started, is not installed, and what it needs often neither: of such a one comes only what is not offered here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module, invalidate_caches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

NOT_OURS = ("site-packages", "dist-packages")
_joined: set[str] = set()
"""What of `sys.path` the folders of users' files are."""


def look_in(folders: Iterable[Path]) -> None:
    """They join the end of `sys.path`, so that no file of a user stands in for an installed library."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
            _joined.add(folder)
    invalidate_caches()


class Absent(ModuleNotFoundError):
    """A name that nothing here answers to; its text says what does."""

    package = ""
    """What would have to be installed."""


class Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the modules of one package, for whoever may have them."""

    def __init__(
        self,
        offered: Mapping[str, Mapping[str, str]],
        refusal: Callable[[str], str],
        version: str = "",
        package: str = "",
    ) -> None:
        """`offered`: module -> name -> `module:name` of ours; `refusal` is what whoever asks for another is told, and
        `package` what the package is installed as, where that is not its name."""
        self.offered, self.refusal, self.version = offered, refusal, version
        self.root = next(iter(offered)).partition(".")[0]
        self.package = package or self.root
        self.folders: set[Path] = set()
        self.packages: set[str] = set()
        self._loading: ContextVar[bool] = ContextVar(f"loading what imports {self.root}", default=False)

    @contextmanager
    def standing_in(self, module: str = "", folders: Iterable[Path] = ()) -> Iterator[None]:
        """The names are there for the block, and then for the module's package and for code in the folders."""
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
        if fullname.partition(".")[0] != self.root or not (self._loading.get() or self._is_user(sys._getframe(1))):
            return None
        above, _, last = fullname.rpartition(".")
        offered, below_ours = fullname in self.offered, isinstance(sys.modules.get(above), _Stand)
        if not (offered and below_ours) and self._is_elsewhere(fullname, path):
            return None
        if not offered:
            raise self.absent(fullname, fullname)
        spec = ModuleSpec(fullname, self, is_package=True)
        places = [Path(place, last) for place in (filter(_joined.__contains__, sys.path) if path is None else path)]
        spec.submodule_search_locations = [str(place) for place in places if place.is_dir()]
        return spec

    def _is_elsewhere(self, fullname: str, path: Sequence[str] | None) -> bool:
        """Whether somebody else finds it, be it in one of the folders that are no user's."""
        places = [place for place in sys.path if place not in _joined] if path is None else path
        others = (finder for finder in sys.meta_path if finder is not self)
        return any(finder.find_spec(fullname, places) is not None for finder in others)

    def absent(self, name: str, module: str) -> Absent:
        error = Absent(self.refusal(name), name=module)
        error.package = self.package
        return error

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stand(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        for name, target in self.offered[module.__name__].items():
            ours, _, attribute = target.partition(":")
            setattr(module, name, getattr(import_module(ours), attribute))
        if module.__name__ == self.root and self.version:
            module.__version__ = self.version  # type: ignore[attr-defined]

    def _is_user(self, frame: FrameType | None) -> bool:
        """Whether the code that imports was loaded for a configuration, or lies where such code was."""
        while frame is not None and is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).partition(".")[0] in self.packages:
            return True
        file = Path(frame.f_code.co_filename)
        return not set(NOT_OURS) & set(file.parts) and any(file.is_relative_to(folder) for folder in self.folders)


class _Stand(ModuleType):
    """A module whose names are objects of ours."""

    def __init__(self, name: str, finder: Finder) -> None:
        super().__init__(name, f"Stands in for {name}.")
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or f"{self.__name__}.{name}" in self._finder.offered:
            raise AttributeError(name)  # The import system asks for these, and goes on to look for a module.
        raise self._finder.absent(f"{self.__name__}.{name}", self.__name__)


def is_machinery(file: str) -> bool:
    """Whether code of this file only carries an import out, for somebody else."""
    return "importlib" in file or file == __file__
