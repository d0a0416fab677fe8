"""The content of a git repository: its branches' trees and messages, and what is staged, without times and packs.

The repository's own configuration could name programs. `git` reads its objects through a repository of ours, which is
empty.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from gateway.process.spawn import CommandError, run_command

GIT_S = 20.0
MAX_COMMITS = 20_000
MAX_REFS = 5_000
MAX_FILE_BYTES = 4 * 2**20
MAX_PRINTED_BYTES = 64 * 2**20


class StateTooLarge(Exception):
    """A folder has more content than is hashed."""


def own_repository() -> Path:
    """A repository without anything, in the user's cache; git needs one to read the objects of another one."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "mtrl" / "empty.git"
    for name in ("objects", "refs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "HEAD").exists():
        (folder / "HEAD").write_text("ref: refs/heads/none\n", encoding="ascii")
    return folder


def is_repository(folder: Path) -> bool:
    """Whether a folder is the inside of a repository: `.git`, or a bare one.

    One with links in their place, or with the objects of another repository, counts as files: git would follow those.
    """
    if (folder / "objects" / "info" / "alternates").exists():
        return False
    wanted = (("HEAD", stat.S_ISREG), ("objects", stat.S_ISDIR), ("refs", stat.S_ISDIR))
    return all(_has_mode(folder / name, has_mode) for name, has_mode in wanted)


def _has_mode(path: Path, has_mode: Callable[[int], bool]) -> bool:
    try:
        return has_mode(path.lstat().st_mode)
    except OSError:
        return False


def digest_repository(folder: Path) -> bytes:
    """The digest of what HEAD and the branches lead to, of the index, and of the configuration."""
    refs, head = read_refs(folder), _read(folder / "HEAD")
    commits = _CommitReader(folder)
    digest = sha256(repr(("HEAD", head if head.startswith(b"ref:") else commits.digest(head.strip()))).encode())
    for name, commit in sorted(refs.items()):
        digest.update(repr((name, commits.digest(commit))).encode())
    digest.update(repr(("config", _read(folder / "config"))).encode())
    if (folder / "index").is_file():
        digest.update(_run_git(folder, "ls-files", "--stage", "-z", GIT_INDEX_FILE=str(folder / "index")))
    return digest.digest()


def read_refs(folder: Path) -> Mapping[str, bytes]:
    """The object that each branch and tag names, packed or not."""
    refs: dict[str, bytes] = {}
    for line in _read(folder / "packed-refs").splitlines():
        commit, _, name = line.partition(b" ")
        if len(commit) in (40, 64) and name:
            refs[os.fsdecode(name)] = commit
    for place, folders, files in os.walk(folder / "refs"):
        folders.sort()
        for file in files:
            content = _read(Path(place) / file).strip()
            refs[(Path(place) / file).relative_to(folder).as_posix()] = content
        if len(refs) > MAX_REFS:
            raise StateTooLarge(f"more than {MAX_REFS} branches and tags")
    return refs


class _CommitReader:
    """Digests commits by their trees, messages, authors and parents, without times."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[bytes, bytes] = {}

    def digest(self, name: bytes) -> bytes:
        if not name or not all(character in b"0123456789abcdef" for character in name):
            return name  # A symbolic ref.
        if name not in self._known:
            self._known.update(self._read_history(name))
        return self._known.get(name, name)

    def _read_history(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The digests of a commit and those before it, oldest first. What is no commit counts by its name."""
        layout = "--format=%H %P%n%T%n%an <%ae>%n%B%x00"
        most = f"--max-count={MAX_COMMITS}"
        listed = _run_git(self._folder, "log", "--reverse", "--topo-order", most, layout, name.decode(), "--")
        known: dict[bytes, bytes] = {}
        for record in listed.split(b"\0"):
            first, _, rest = record.lstrip(b"\n").partition(b"\n")
            commit, *parents = first.split()[:64] or [b""]
            if commit:
                known[commit] = sha256(repr(([known.get(one, one) for one in parents], rest)).encode()).digest()
                yield commit, known[commit]


def _run_git(folder: Path, *arguments: str, **more: str) -> bytes:
    """What git prints about the objects of a repository; empty if it fails."""
    program = shutil.which("git")
    if program is None:
        raise OSError("`git` is not installed, which compares git repositories (Debian: apt-get install git)")
    nothing, own = os.devnull, str(own_repository())
    env = {
        "PATH": os.environ.get("PATH", os.defpath), "HOME": nothing, "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": nothing, "GIT_DIR": own, "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
        "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", **more,
    }  # fmt: skip
    command = [program, "-c", f"safe.directory={own}", "--no-pager", *arguments]
    try:
        return run_command(command, GIT_S, max_bytes=MAX_PRINTED_BYTES, env=env, cwd="/").output
    except CommandError as error:
        raise StateTooLarge(
            f"git needs more than {GIT_S:g} s or {MAX_PRINTED_BYTES // 2**20} MB to tell its history"
        ) from error


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(descriptor, "rb") as opened:
        return opened.read(MAX_FILE_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
