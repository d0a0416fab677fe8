"""Confines a command in Linux namespaces of its own, where bubblewrap is not installed; run as a program of its own.

Its argument is JSON, or `-` for JSON on standard input: what exists inside, and the command. The root of the file
system is made in memory and is gone afterwards; whatever else the machine has does not exist inside.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

NEW_USER = 0x10000000
NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""Mounts, processes, network, IPC, host name, control groups."""
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
"""Numbers of the system call."""
MOUNT_SETATTR, HERE, WHOLE_TREE = 442, -100, 0x8000
SET_DUMPABLE, DROP_BOUNDING, DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 4, 24, 1, 38
LAST_CAPABILITY = 63
NEW_ROOT = "/tmp"  # noqa: S108 - a file system in memory is mounted there, seen by nobody else.
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads what is to exist, makes the namespaces, and runs the command as their first process."""
    from_stdin = sys.argv[1] == "-"
    layout: dict[str, Any] = json.load(sys.stdin) if from_stdin else json.loads(sys.argv[1])
    os.umask(0o022)
    if from_stdin:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    _enter_namespaces()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    _make_root(layout)
    _drop_privileges(layout["user"])
    _check(_libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")
    os.chdir(layout["folders"][0])
    os.execve(layout["launcher"][0], layout["launcher"], layout["environment"])  # noqa: S606 - confined


def _enter_namespaces() -> None:
    """Makes the namespaces: without one of users where root may, so that another user can be changed to afterwards."""
    if os.geteuid() == 0 and _libc.unshare(NEW_NAMESPACES) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(NEW_USER | NEW_NAMESPACES), "unshare")
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        _write(f"/proc/self/{file}", text)


def _make_root(layout: Mapping[str, Any]) -> None:
    """Makes the new root of the file system in memory, and leaves the old one."""
    _mount("none", "/", "", RECURSIVE | PRIVATE)
    # Opened before a file system in memory hides those that lie in the same folder.
    read_only = {inside: os.open(file, os.O_PATH) for inside, file in layout["programs"].items()}
    writable = {folder: os.open(folder, os.O_PATH) for folder in layout["writable"]}
    _mount("tmpfs", NEW_ROOT, "tmpfs", NO_SUID | NO_DEVICES, f"size={4 * layout['folder_bytes']},nr_inodes=4k,mode=755")
    for folder in layout["memory_folders"]:
        os.makedirs(NEW_ROOT + folder)
        options = f"size={layout['folder_bytes']},nr_inodes=2k,mode=777"
        _mount("tmpfs", NEW_ROOT + folder, "tmpfs", NO_SUID | NO_DEVICES, options)
    for folder in layout["folders"]:
        os.makedirs(NEW_ROOT + folder, exist_ok=True)
        os.chmod(NEW_ROOT + folder, 0o777)  # noqa: S103 - nobody else is inside
    for inside, opened in read_only.items():
        _bind(opened, inside, READ_ONLY | NO_SUID | NO_DEVICES)
    for folder, opened in writable.items():
        _bind(opened, folder, NO_SUID | NO_DEVICES)
    for device in DEVICES:
        _bind(os.open(device, os.O_PATH), device, NO_SUID)
    for inside, text in layout["files"].items():
        _make_file(NEW_ROOT + inside, text)
        _bind(os.open(NEW_ROOT + inside, os.O_PATH), inside, READ_ONLY | NO_SUID | NO_DEVICES)
    for inside, target in layout["links"].items():
        os.symlink(target, NEW_ROOT + inside)
    os.chdir(NEW_ROOT)
    _check(_libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", DETACH), "umount")  # The old root lies over the new one until here.
    os.chdir("/")
    _mount("", "/", "", BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES)


def _bind(opened: int, inside: str, attributes: int) -> None:
    """Mounts an opened file or folder with what is mounted below it; the attributes hold for all of that."""
    target = NEW_ROOT + inside
    if os.path.isdir(f"/proc/self/fd/{opened}"):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        _make_file(target, "")
    _mount(f"/proc/self/fd/{opened}", target, "", BIND | RECURSIVE)
    changes = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = _libc.syscall(MOUNT_SETATTR, HERE, target.encode(), WHOLE_TREE, changes, ctypes.c_size_t(32))
    _check(result, f"mount_setattr {target}")
    os.close(opened)


def _make_file(file: str, text: str) -> None:
    os.makedirs(os.path.dirname(file), exist_ok=True)
    _write(file, text, os.O_CREAT | os.O_EXCL)


def _write(file: str, text: str, flags: int = 0) -> None:
    """Writes with system calls only: after the change of root, Python may not be able to import anything."""
    descriptor, data = os.open(file, os.O_WRONLY | flags, 0o755), text.encode()
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def _drop_privileges(user: int) -> None:
    """Changes to an unprivileged user where possible, and gives up all capabilities, with all that it starts."""
    _check(_libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(DROP_BOUNDING, capability, 0, 0, 0)  # Fails for numbers that this kernel does not have.
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):  # In a user namespace, there is no other user.
                raise
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, sets), "capset")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode())
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
