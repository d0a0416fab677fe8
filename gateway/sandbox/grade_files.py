"""Collects and places the files of a grade, inside a box in which nothing else runs.

What lies there may be the policy's: no link is followed out of what is collected, nothing but regular files is read,
and what is collected has a limit. Run with `python -I -S`: its argument is JSON, and so is what it prints.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tarfile
from contextlib import suppress
from typing import Any

KERNEL_FOLDERS = ("/proc/", "/dev/", "/sys/", "/.mtrl/")
REWARDS = ("reward.json", "reward.txt")
TOO_MUCH = 3
"""Exit status where there is more than may be collected."""
FAILED = 4
NO_WAIT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class TooMuch(Exception):
    """More than may be collected."""


class Collection:
    """An archive of what was collected."""

    def __init__(self, archive: str, max_bytes: int, max_files: int) -> None:
        self.tar = tarfile.open(archive, "w")  # noqa: SIM115 - it is closed at the end
        self.left_bytes, self.left_files, self.left_out = max_bytes, max_files, 0

    def add(self, path: str, top: str) -> None:
        """Adds a file or folder under its own name, if it is of a kind that is collected."""
        waiting = [path]
        while waiting:
            path = waiting.pop()
            try:
                state = os.lstat(path)
                if stat.S_ISDIR(state.st_mode):
                    os.chmod(path, state.st_mode | 0o700)
                    names = sorted(os.listdir(path))
                    self.add_header(path, tarfile.DIRTYPE, 0o755)
                    waiting += [os.path.join(path, name) for name in names]
                elif stat.S_ISREG(state.st_mode):
                    self.add_file(path, state)
                elif stat.S_ISLNK(state.st_mode) and stays_inside(path, os.readlink(path), top):
                    self.add_header(path, tarfile.SYMTYPE, 0o777, os.readlink(path))
                else:
                    self.left_out += 1
            except (OSError, ValueError):
                self.left_out += 1

    def add_header(self, path: str, kind: bytes, mode: int, target: str = "") -> None:
        """Adds what has no content."""
        self.count(0)
        header = tarfile.TarInfo(path.lstrip("/"))
        header.type, header.mode, header.linkname = kind, mode, target
        self.tar.addfile(header)

    def add_file(self, path: str, state: os.stat_result) -> None:
        """Adds a regular file."""
        self.count(state.st_size)
        os.chmod(path, stat.S_IMODE(state.st_mode) | 0o400)
        with open(os.open(path, NO_WAIT), "rb") as file:
            header = tarfile.TarInfo(path.lstrip("/"))
            header.size, header.mode = state.st_size, 0o755 if state.st_mode & 0o100 else 0o644
            self.tar.addfile(header, file)

    def count(self, size: int) -> None:
        """Counts what may be collected at most."""
        self.left_bytes, self.left_files = self.left_bytes - size, self.left_files - 1
        if min(self.left_bytes, self.left_files) < 0:
            raise TooMuch


def stays_inside(path: str, target: str, top: str) -> bool:
    """Whether a link leads to a place in what is collected, wherever other links there lead: it goes up at its
    beginning only, through folders that are no links, and never above the top."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    place = os.path.normpath("/".join((os.path.dirname(path), *parts[:up])))
    return not target.startswith("/") and ".." not in parts[up:] and is_below(place, top)


def is_below(path: str, top: str) -> bool:
    """Whether a path without links is the top, or lies below it."""
    return (path + "/").startswith(top.rstrip("/") + "/")


def belongs(member: tarfile.TarInfo, tops: list[str]) -> bool:
    """Whether a member of the artifacts' archive is what `collect` would have added: the policy may have made it."""
    path = "/" + member.name
    above = [top for top in tops if os.path.normpath(path) == path and is_below(path, top)]
    return any(not member.issym() or stays_inside(path, member.linkname, top) for top in above)


def collect(given: dict[str, Any]) -> dict[str, Any]:
    """Writes the archive of what was named and is there."""
    made = Collection(given["archive"], given["max_bytes"], given["max_files"])
    for path in given["collect"]:
        if os.path.lexists(path) and not f"{os.path.realpath(os.path.dirname(path))}/".startswith(KERNEL_FOLDERS):
            made.add(path, path)
    made.tar.close()
    return {"planted": count_rewards(given["reward"]), "left_out": made.left_out}


def count_rewards(folder: str) -> int:
    """How many reward files there are."""
    return sum(os.path.lexists(os.path.join(folder, name)) for name in REWARDS)


def place(given: dict[str, Any]) -> dict[str, Any]:
    """Removes and makes what a grade needs, then unpacks the archives."""
    planted = count_rewards(given["reward"])
    for path in (*given["remove"], given["reward"]):
        remove(path)
    make_folder(given["reward"])
    for archive, tops in given["unpack"]:
        with tarfile.open(archive) as tar:
            for member in tar:
                if tops is None or belongs(member, tops):
                    unpack(tar, member)
        os.remove(archive)
    return {"planted": planted}


def unpack(tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Writes a member of one of the archives, which were made by `collect` or by the gateway."""
    path = "/" + member.name
    if member.isdir():
        make_folder(path)
        return
    make_folder(os.path.dirname(path))
    remove(path)
    if member.issym():
        os.symlink(member.linkname, path)
        return
    if (content := tar.extractfile(member)) is not None:
        with open(path, "xb") as file:
            shutil.copyfileobj(content, file)
        os.chmod(path, member.mode | 0o400)


def make_folder(path: str) -> None:
    """Makes a folder and those above it. In the way may be anything but the links of the system itself."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path))
    remove(path)
    os.mkdir(path)


def remove(path: str) -> None:
    """Removes whatever is at a path, however deep it is. Nothing else runs here."""
    if os.path.islink(path) or not os.path.isdir(path):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
        return
    before = os.open(".", os.O_PATH)
    os.chdir(os.path.dirname(path))
    waiting = [[os.path.basename(path)]]
    while waiting:
        if waiting[-1]:
            os.chmod(waiting[-1][-1], 0o700)
            os.chdir(waiting[-1][-1])
            waiting.append(empty_folder())
        else:
            waiting.pop()
            if waiting:
                os.chdir("..")
                os.rmdir(waiting[-1].pop())
    os.fchdir(before)
    os.close(before)


def empty_folder() -> list[str]:
    """Removes the files of the working folder; returns the names of its folders."""
    with os.scandir(".") as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name)
    return [name for name, is_folder in found if is_folder]


def main() -> None:
    """Does what the argument says."""
    given = json.loads(sys.argv[1])
    try:
        done = collect(given) if "collect" in given else place(given)
    except TooMuch:
        sys.exit(TOO_MUCH)
    except (OSError, RecursionError, tarfile.TarError) as error:
        sys.stderr.write(str(error))
        sys.exit(FAILED)
    sys.stdout.write(json.dumps(done))


if __name__ == "__main__":
    main()
