"""Mounts the files that a sandbox begins with, then replaces itself by its command line.

A prepared folder lies under an overlay, so that nothing is copied. That of a sandbox's `/rollout` is in memory; where
the kernel does not allow it, and for archives, a folder in memory gets a copy. A box with a root, or whose files are to
outlive its processes, always has an overlay: its layers are the root or the state, what each earlier box of the rollout
has written, and what it writes itself. All mounts are in a namespace of this process, and gone with it and with the
descriptors that lead there. Run as a program of its own with `python -I -S`: its argument is JSON, and the command line
follows.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import shutil
import signal
import stat
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
NO_SUID, NO_DEVICES, RECURSIVE, PRIVATE = 2, 4, 16384, 1 << 18
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
HERE, EMPTY_PATH, CLONE_TREE, FROM_EMPTY_PATH = -100, 0x1000, 1, 4
READ_ONLY, ID_MAP = 1, 0x00100000
ROOT_OPTIONS, USER_OPTIONS = "index=off,redirect_dir=off,metacopy=off", "index=off,redirect_dir=nofollow,userxattr"
OPEN_FOLDERS = ("/tmp/", "/rollout/")  # noqa: S108 - inside
UNPACK = os.path.join(os.path.dirname(os.path.dirname(__file__)), "state", "unpack_tar.py")
"""This program has no packages."""
FAILED, DETACH = 125, 2
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Mounts, and goes on as the command; with `probe`, prints why the state would be copied instead, if it would."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    how = mount_layers if "lower" in settings else mount_state
    try:
        problem = how(settings)
    except (OSError, ValueError, EOFError, shutil.Error, tarfile.TarError, zipfile.BadZipFile) as error:
        sys.stderr.write(f"its `state` cannot be put in: {error}\n")
        sys.exit(FAILED)
    if settings.get("probe"):
        sys.stdout.write(problem)
        return
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command line of a sandbox
    except OSError as error:
        sys.stderr.write(f"cannot start {sys.argv[2]!r}: {error.strerror}\n")
        sys.exit(FAILED)


def mount_state(settings: Mapping[str, Any]) -> str:
    """Mounts the state at `merged` below the place; returns why it is a copy, if it is one."""
    enter_namespace()
    place, state = settings["place"], settings["state"]
    options = f"size={settings['bytes']},nr_inodes={settings['files']},mode=755"
    mount("tmpfs", place, "tmpfs", NO_SUID | NO_DEVICES, options)
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(f"{place}/{name}")
    user = settings["user"]
    for name in ("upper", "merged"):
        os.chmod(f"{place}/{name}", 0o777)  # noqa: S103 - it is the sandbox's alone
        give(f"{place}/{name}", user)
    problem = "" if os.path.isdir(state) else "it is an archive"
    try:
        if not problem:
            mount_overlay(place, state, user)
    except OSError as error:
        problem = str(error)
    if problem and not settings["probe"]:
        copy(state, f"{place}/merged", user)
    return problem


def mount_layers(settings: Mapping[str, Any]) -> str:
    """Lays a folder in memory over the root or state, and over what earlier boxes left, in the namespace of which their
    layers lie: that of box N is `place`, and N times `next`."""
    place, user, depth, lower = (settings[name] for name in ("place", "user", "depth", "lower"))
    tops = [place + "/next" * number for number in range(depth + 1)]
    if depth:
        enter_kept(settings["kept"], f"{tops[-2]}/merged")
    else:
        enter_namespace()
    options = f"size={settings['bytes']},nr_inodes={settings['files']},mode=755"
    mount("tmpfs", tops[-1], "tmpfs", NO_SUID | NO_DEVICES, options)
    os.chdir(tops[-1])
    for name in ("lower", "upper", "work", "merged", "next"):
        os.mkdir(name)
    os.chmod("upper", 0o755 if settings["is_root"] else 0o777)
    give("upper", user)
    if not depth and os.path.isdir(lower):
        attach(open_tree(lower, user or None, is_checked=not settings["is_root"]), "lower")
    elif not depth and lower:
        copy(lower, "lower", user)
    below = ":".join([*(f"{top}/upper" for top in tops[-2::-1]), f"{place}/lower"])
    layers = f"lowerdir={below},upperdir=upper,workdir=work"
    how = ROOT_OPTIONS if os.geteuid() == 0 else USER_OPTIONS
    mount("overlay", f"{tops[-1]}/merged", "overlay", NO_SUID | NO_DEVICES, f"{layers},{how}")
    for path in settings["points"]:
        make_mount_point(f"{tops[-1]}/merged", path, user)
    os.chdir("/")
    return ""


def enter_kept(kept: Sequence[str], merged: str) -> None:
    """Enters a copy of the namespace of an earlier box, and of users if it has one, by the files that lead there."""
    kinds = zip(kept, (NEW_USER, NEW_MOUNTS), strict=True)
    opened = [(os.open(path, os.O_RDONLY), kind) for path, kind in kinds if path]  # In another one they are not seen.
    for descriptor, kind in opened:
        check(_libc.setns(descriptor, kind), "setns")
        os.close(descriptor)
    _libc.umount2(merged.encode(), DETACH)  # Of a box that has ended: what lies below it is written no more.
    check(_libc.unshare(NEW_MOUNTS), "unshare")
    mount("none", "/", "", RECURSIVE | PRIVATE)


def make_mount_point(merged: str, path: str, user: int) -> None:
    """Makes a folder or file over which something is mounted, and folders above it. What else is there, such as a link
    of the policy's that would lead elsewhere, is removed, and folders that were closed can be entered."""
    parts = [part for part in path.split("/") if part]
    for number in range(len(parts) + 1):
        place, is_file = "/".join((merged, *parts[:number])), number == len(parts) and not path.endswith("/")
        kind = os.lstat(place).st_mode if os.path.lexists(place) else 0
        if (stat.S_ISREG if is_file else stat.S_ISDIR)(kind):
            if stat.S_ISDIR(kind) and kind & 0o555 != 0o555:
                os.chmod(place, stat.S_IMODE(kind) | 0o555)  # noqa: S103 - it is the box's alone
            continue
        if kind:
            remove = runpy.run_path(os.path.join(os.path.dirname(__file__), "grade_files.py"))["remove"]
            remove(place)
        if is_file:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL, 0o644))
        else:
            os.mkdir(place)
            os.chmod(place, 0o1777 if path in OPEN_FOLDERS else 0o755)
        give(place, user)


def enter_namespace() -> None:
    """A namespace of mounts of its own; for others than root, with one of users, in which they may mount."""
    user, group = os.geteuid(), os.getegid()
    check(_libc.unshare(NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER), "unshare")
    if user:
        write_maps("self", f"{user} {user} 1", f"{group} {group} 1")
    mount("none", "/", "", RECURSIVE | PRIVATE)


def mount_overlay(place: str, state: str, user: int) -> None:
    """Lays an empty folder in memory over the state; raises OSError where that cannot be done."""
    attach(open_tree(state, user or None), f"{place}/lower")
    layers = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    options = f"{layers},{ROOT_OPTIONS if os.geteuid() == 0 else USER_OPTIONS}"
    mount("overlay", f"{place}/merged", "overlay", NO_SUID | NO_DEVICES, options)


def attach(tree: int, target: str) -> None:
    """Puts a mount at its place, and closes its descriptor."""
    check(_libc.syscall(MOVE_MOUNT, tree, b"", HERE, target.encode(), FROM_EMPTY_PATH), "move_mount")
    os.close(tree)


def open_tree(state: str, user: int | None, *, is_checked: bool = True) -> int:
    """The state, read-only, as a mount of its own, in which the files of its owner are the user's, if one is named."""
    tree: int = _libc.syscall(OPEN_TREE, HERE, state.encode(), CLONE_TREE)
    check(min(tree, 0), "open_tree")
    attributes, namespace = READ_ONLY | NO_SUID | NO_DEVICES, 0
    owner = os.stat(state)
    if user is not None and is_checked:
        check_files(state, owner)
    if user is not None and (owner.st_uid, owner.st_gid) != (user, user):
        namespace = open_id_map(f"{owner.st_uid} {user} 1", f"{owner.st_gid} {user} 1")
        attributes |= ID_MAP
    changes = (ctypes.c_uint64 * 4)(attributes, 0, 0, namespace)
    check(_libc.syscall(MOUNT_SETATTR, tree, b"", EMPTY_PATH, changes, ctypes.c_size_t(32)), "mount_setattr")
    return tree


def check_files(state: str, owner: os.stat_result) -> None:
    """Raises OSError if files have several owners, only one of whom can become the user, or lie on mounts of their own,
    which would not be seen."""
    for folder, folders, files in os.walk(state):
        for name in (*folders, *files):
            entry = os.lstat(os.path.join(folder, name))
            if (entry.st_uid, entry.st_gid) != (owner.st_uid, owner.st_gid):
                raise OSError(f"{folder}/{name} has another owner than {state}")
            if entry.st_dev != owner.st_dev:
                raise OSError(f"{folder}/{name} lies on another file system than {state}")


def open_id_map(users: str, groups: str) -> int:
    """The descriptor of a namespace of users with these maps."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1" if _libc.unshare(NEW_USER) == 0 else b"0")
        os.read(done[0], 1)
        os._exit(0)
    try:
        if os.read(ready[0], 1) != b"1":
            raise OSError("no namespace of users can be made")
        write_maps(str(child), users, groups)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def write_maps(process: str, users: str, groups: str) -> None:
    """Writes which users and groups a namespace of users has."""
    for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def copy(state: str, folder: str, user: int) -> None:
    """Copies a folder, or unpacks an archive, and gives all of it to the user."""
    if os.path.isdir(state):
        shutil.copytree(state, folder, symlinks=True, dirs_exist_ok=True, copy_function=copy_file)
    elif state.endswith(".zip"):
        with zipfile.ZipFile(state) as zipped:
            zipped.extractall(folder)  # noqa: S202 - it keeps members inside
    else:
        with tarfile.open(state) as tar:
            runpy.run_path(UNPACK)["unpack_tar"](tar, folder)
    os.chmod(folder, 0o777)  # noqa: S103 - it is the sandbox's alone
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            give(os.path.join(place, name), user)


def copy_file(source: str, target: str) -> None:
    """Copies a regular file; raises OSError for anything else."""
    if not stat.S_ISREG(os.stat(source).st_mode):  # Opening a pipe would wait for its other end.
        raise OSError(f"{source} is no regular file")
    shutil.copy2(source, target)


def give(path: str, user: int) -> None:
    """Makes the user the owner, where there is one."""
    if user:
        os.chown(path, user, user, follow_symlinks=False)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """The mount call; raises OSError with the target's name."""
    words: Sequence[bytes] = (source.encode(), target.encode(), kind.encode())
    check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def check(result: int, what: str) -> None:
    """Raises OSError with libc's error if a call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
