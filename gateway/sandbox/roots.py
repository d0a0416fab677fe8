"""Root file systems for sandboxes, made of container images: `mtrl-gateway roots add NAME FILE.tar`.

A root is a folder of the user's data. All its files have one owner and no device, and what an archive says is never
followed out of it: images come from anywhere.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gateway.errors import ConfigError
from gateway.sandbox.sandbox_environment import NAME as VARIABLE
from gateway.sandbox.sandbox_layout import ROLLOUT
from gateway.sandbox.sandbox_settings import NAME_OF_ROOT as NAME
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.state.remove_folder import remove_folder

MAX_BYTES, MAX_MEMBERS = 32 * 2**30, 2_000_000
MAX_HEADER_BYTES = 2**20
"""Of a long name, or of the extended header of a member, which is read at once."""
MAX_TEXT_BYTES = 16 * 2**20
"""Of a manifest."""
MAX_PARTS, MAX_LINKS = 256, 40
MACHINES = {"x86_64": ("amd64", 62), "aarch64": ("arm64", 183)}
"""What images and programs call this machine."""
BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError)
"""What else archives raise that are broken, beside what a manifest raises that is none."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
DESCRIPTION = "image.json"
"""Beside the files of a root: what its image says of itself."""


class _Member(tarfile.TarInfo):
    """A member of an archive whose headers have a limited size: tarfile reads them whole."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        headers = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*headers, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK) and self.size > MAX_HEADER_BYTES:
            raise ValueError(f"it has a header of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Root:
    """A root that has been added."""

    name: str
    folder: Path
    """Its files, and what its image says."""

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def image(self) -> Mapping[str, Any]:
        """The image's `env` and `workdir`, and its `bytes` and `files`."""
        read: Mapping[str, Any] = json.loads((self.folder / DESCRIPTION).read_text(encoding="utf-8"))
        return read


def roots_folder() -> Path:
    """Where roots are: `mtrl/roots` in `$XDG_DATA_HOME`, by default `~/.local/share`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "mtrl" / "roots"


def list_roots() -> list[Root]:
    """The roots that have been added, by name."""
    folder = roots_folder()
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [Root(name, folder / name) for name in names if NAME.fullmatch(name)]


def describe_root(root: Root) -> str:
    """A root's name and size, for people."""
    try:
        return f"{root.name}: {root.image['bytes'] / 2**20:.1f} MB in {root.image['files']} files"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{root.name}: it cannot be read ({error}); remove it"


def find_root(name: str) -> Root:
    """The root of this name; raises ConfigError if there is none."""
    root = Root(name, roots_folder() / name)
    if NAME.fullmatch(name) and (root.folder / DESCRIPTION).is_file():
        return root
    known = ", ".join(root.name for root in list_roots()) or "none"
    remedy = f"add it with `mtrl-gateway roots add {name} FILE.tar`, of an image's `docker save` or `docker export`"
    raise ConfigError(f"there is no root {name!r:.100} in {roots_folder()}; there are: {known}", remedy=remedy)


def find_workdir(settings: SandboxSettings) -> str:
    """The folder in which tools of a sandbox work, as far as it is known here: a root may be on another machine."""
    if settings.workdir or not settings.root:
        return settings.workdir or ROLLOUT
    try:
        return find_root(settings.root).image["workdir"] or ROLLOUT
    except (ConfigError, OSError, ValueError, KeyError):
        return ROLLOUT


def remove_root(name: str) -> None:
    """Removes a root. Boxes that run on it go on, as far as their files are open."""
    root = Root(name, roots_folder() / name)
    if not NAME.fullmatch(name) or not root.folder.is_dir():
        find_root(name)
    hidden = root.folder.with_name(f".{name}-{os.getpid()}")
    root.folder.rename(hidden)
    remove_folder(hidden)


def add_root(name: str, archive: Path) -> tuple[Root, str]:
    """Makes a root of `docker save`, `docker export` or an OCI archive; returns what is left out, in words, too."""
    if not NAME.fullmatch(name):
        remedy = "use lower-case letters, digits, `.`, `_` and `-`"
        raise ConfigError(f"{name!r:.100} is not the name of a root", remedy=remedy)
    root = Root(name, roots_folder() / name)
    if root.folder.exists():
        raise ConfigError(f"there is a root {name} already", remedy=f"run `mtrl-gateway roots remove {name}` first")
    try:
        root.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root.folder.parent))
        folder.chmod(0o755)  # Users of sandboxes go through it.
        try:
            unpacked = _Unpacked(Root(name, folder).files)
            image = _read_archive(archive, unpacked)
            _check_machine(unpacked)
            described = {**image, "bytes": unpacked.bytes, "files": unpacked.members, "closed": unpacked.find_closed()}
            (folder / DESCRIPTION).write_text(json.dumps(described), encoding="utf-8")
            folder.rename(root.folder)
        finally:
            if folder.exists():
                remove_folder(folder)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError, *BROKEN) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else f"{error}" or type(error).__name__
        remedy = "give the .tar of `docker save`, of `docker export`, or of an OCI image of Linux"
        raise ConfigError(f"{archive}: no root can be made of it: {why}", remedy=remedy) from error
    left_out = [f"{unpacked.left_out} devices and pipes were left out"] if unpacked.left_out else []
    entrypoint = [f"its entrypoint is not run: {image['entrypoint']:.200}"] if image["entrypoint"] else []
    return root, "; ".join([*left_out, *entrypoint])


def _read_archive(archive: Path, unpacked: _Unpacked) -> Mapping[str, Any]:
    """Unpacks the layers of an archive, or the files that it is of; returns what the image says of itself."""
    with _open_tar(archive) as tar:
        names = {member.name.removeprefix("./"): member for member in _members(tar)}
        if "manifest.json" in names:
            first = json.loads(_read_text(tar, names["manifest.json"]))[0]
            layers, config = [names[layer] for layer in first["Layers"]], names[first["Config"]]
        elif "index.json" in names and "oci-layout" in names:
            manifest = _find_manifest(tar, names)
            layers = [names[_blob(layer)] for layer in manifest["layers"]]
            config = names[_blob(manifest["config"])]
        else:
            layers, config = [], None
        about = {} if config is None else json.loads(_read_text(tar, config))
        if not _is_ours(about):
            theirs = f"{about.get('os', 'linux')} on {about.get('architecture', 'another machine')}"
            raise ValueError(f"it is an image of {theirs}, and this is Linux on {platform.machine()}")
        for layer in layers:
            if (content := tar.extractfile(layer)) is None:  # A link to the same layer, in old archives.
                raise ValueError(f"its layer {layer.name!r:.100} is no file")
            with _open_tar(content) as inner:
                unpacked.add_layer(inner)
    if not layers:
        with _open_tar(archive) as tar:
            unpacked.add_layer(tar)
    settings = about.get("config") or {}
    pairs = (str(pair).partition("=") for pair in settings.get("Env") or ())
    env = {name: value for name, _, value in pairs if VARIABLE.fullmatch(name) and "\0" not in value}
    workdir = str(settings.get("WorkingDir") or "")
    entry = settings.get("Entrypoint")
    entrypoint = " ".join(map(str, entry)) if isinstance(entry, list) else ""
    return {"env": env, "workdir": workdir if workdir.startswith("/") else "", "entrypoint": entrypoint}


@contextmanager
def _open_tar(source: Path | IO[bytes]) -> Iterator[tarfile.TarFile]:
    """An archive, compressed with gzip, bzip2 or xz, or not."""
    how: dict[str, Any] = {"name": source} if isinstance(source, Path) else {"fileobj": source}
    try:
        with tarfile.open(mode="r:*", tarinfo=_Member, **how) as tar:
            yield tar
    except tarfile.ReadError as error:
        raise ValueError(f"it, or a layer of it, is no .tar, .tar.gz, .tar.bz2 or .tar.xz: {error}") from error


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for count, member in enumerate(tar):
        if count >= MAX_MEMBERS:
            raise ValueError(f"it has more than {MAX_MEMBERS} members")
        yield member


def _read_text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(member) if member.size <= MAX_TEXT_BYTES else None
    if content is None:
        raise ValueError(f"its {member.name!r:.100} cannot be read")
    return content.read(MAX_TEXT_BYTES)


def _find_manifest(tar: tarfile.TarFile, names: Mapping[str, tarfile.TarInfo]) -> Any:
    """The manifest of an OCI archive for this machine; an index may lead to others."""
    entry: Any = {"mediaType": "index", "name": "index.json"}
    for _ in range(4):
        read = json.loads(_read_text(tar, names[entry.get("name") or _blob(entry)]))
        if "layers" in read:
            return read
        ours = [one for one in read["manifests"] if _is_ours(one.get("platform") or {})]
        if not ours:
            raise ValueError(f"it has no image for Linux on {platform.machine()}")
        entry = {key: value for key, value in ours[0].items() if key != "name"}
    raise ValueError("its indexes lead to no manifest")


def _blob(entry: Mapping[str, Any]) -> str:
    return "blobs/" + str(entry["digest"]).replace(":", "/")


def _is_ours(about: Mapping[str, Any]) -> bool:
    machine = MACHINES.get(platform.machine(), ("", 0))[0]
    return (about.get("os", "linux"), about.get("architecture", machine)) == ("linux", machine)


def _check_machine(unpacked: _Unpacked) -> None:
    """Raises ValueError for what is no Linux of this machine."""
    shell = unpacked.resolve(("bin", "sh"))
    if not shell.is_file() or shell.is_symlink():
        raise ValueError("it is no file system of Linux: it has no /bin/sh")
    with shell.open("rb") as file:
        head = file.read(20)
    number = MACHINES.get(platform.machine(), ("", 0))[1]
    if head[:4] != b"\x7fELF" or (number and int.from_bytes(head[18:20], "little") != number):
        raise ValueError(f"its /bin/sh is no program for Linux on {platform.machine()}")


class _Unpacked:
    """The files of a root while layers are laid over each other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes, self.members, self.left_out = folder, 0, 0, 0
        self.closed = dict[str, tuple[int, int]]()
        """What others may neither read nor run, with its owner, and the group that may; here all have one owner."""
        folder.mkdir(mode=0o755)

    def count(self, size: int) -> None:
        """Counts what an archive may have at most."""
        self.bytes, self.members = self.bytes + size, self.members + 1
        if self.bytes > MAX_BYTES or self.members > MAX_MEMBERS:
            raise ValueError(f"it has more than {MAX_BYTES >> 30} GB, or more than {MAX_MEMBERS} files")

    def add_layer(self, tar: tarfile.TarFile) -> None:
        """Lays a layer over what is there. Whiteouts hide what the layers below have, and nothing of their own."""
        written: set[Path] = set()
        for member in _members(tar):
            parts = _parts(member.name)
            if not parts:
                continue
            name, place = parts[-1], self.resolve(parts[:-1])
            if name == OPAQUE:
                for entry in [*place.iterdir()] if place.is_dir() else ():
                    _remove(entry, written)
            elif name.startswith(WHITEOUT):
                _remove(place / _name(name.removeprefix(WHITEOUT)), written)
            else:
                self.count(member.size)
                self._make_folders(place)
                if self._add(tar, member, place / name):
                    written.add(place / name)

    def resolve(self, parts: Sequence[str]) -> Path:
        return resolve_inside(self.folder, parts)

    def find_closed(self) -> Mapping[str, tuple[int, int]]:
        """What is closed and still there: a later layer may have taken it away, or put a link in its way."""
        folder = self.folder.resolve()
        places = {inside: folder / inside[1:] for inside in self.closed}
        return {
            inside: self.closed[inside]
            for inside, place in places.items()
            if place != folder and os.path.lexists(place) and place.parent.resolve() == place.parent
        }

    def _make_folders(self, place: Path) -> None:
        if not place.is_dir():
            _remove(place)
            self._make_folders(place.parent)
            place.mkdir(mode=0o755)

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bool:
        """Adds a member; whether it is of a kind that a root has. Nothing keeps the rights of another user."""
        inside, right = f"/{path.relative_to(self.folder)}", 1 if member.isdir() else 5
        self.closed.pop(inside, None)
        if not member.issym() and not member.mode & right:
            self.closed[inside] = member.uid, member.gid if member.mode & right << 3 else -1
        if member.isdir():
            if path.is_symlink() or not path.is_dir():
                _remove(path)
                path.mkdir()
            path.chmod(member.mode & 0o1777 | stat.S_IRWXU)
            return True
        if member.islnk():
            source = self.resolve(_parts(member.linkname)[:-1]) / _name(member.linkname)
            if not os.path.lexists(source) or (source.is_dir() and not source.is_symlink()):
                raise ValueError(f"{member.name!r:.100} is a link to {member.linkname!r:.100}, which is no file of it")
            if source != path:
                _remove(path)
                os.link(source, path, follow_symlinks=False)
            return True
        if not member.issym() and not member.isreg():
            self.left_out += 1
            return False
        _remove(path)
        if member.issym():
            path.symlink_to(member.linkname)
        elif (content := tar.extractfile(member)) is not None:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(content, file, 2**20)
            path.chmod(member.mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
        return True


def resolve_inside(folder: Path, parts: Sequence[str]) -> Path:
    """Where a path leads in a root, whatever links are on it: what runs in it sees nothing else. Raises ValueError."""
    place, left, links = folder, [*parts], 0
    while left:
        part = left.pop(0)
        if part == "..":
            place = place if place == folder else place.parent
        elif part not in ("", "."):
            target = place / part
            if target.is_symlink():
                links += 1
                if links > MAX_LINKS or len(left) > MAX_PARTS:
                    raise ValueError(f"its links lead nowhere: {'/'.join(parts)!r:.100}")
                to = os.readlink(target)
                place, left = folder if to.startswith("/") else place, [*to.split("/"), *left]
            else:
                place = target
    return place


def _parts(name: str) -> list[str]:
    """The parts of a member's name; raises ValueError for one that leads out."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or len(parts) > MAX_PARTS or "\0" in name:
        raise ValueError(f"{name!r:.100} leads out of its folder")
    return parts


def _name(path: str) -> str:
    """The last part of a member's name; raises ValueError where there is none."""
    if not (parts := _parts(path)):
        raise ValueError(f"{path!r:.100} names no file of it")
    return parts[-1]


def _remove(path: Path, kept: set[Path] | None = None) -> None:
    """Removes what is at a path, but for what is kept."""
    if path.is_symlink() or not path.is_dir():
        if not kept or path not in kept:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
        return
    if not kept:
        remove_folder(path)
        return
    for entry in [*path.iterdir()]:
        _remove(entry, kept)
    if path not in kept and not any(path.iterdir()):
        path.rmdir()
