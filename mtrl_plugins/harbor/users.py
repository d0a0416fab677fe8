"""Users that Harbor tasks name. A box has one user, who owns all of its files: it gets this one's name and home, and
what the image keeps from this one is taken away."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gateway.sandbox.roots import find_root, resolve_inside
from gateway.sandbox.sandbox_settings import SandboxSettings

ROOT = (None, "", "root", "0", 0)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
BECOME = (
    's="s/^{0}:[^:]*:[0-9]*:[0-9]*:/{1}:x:$(id -u):$(id -g):/p"; (sed -n "$s" /etc/passwd; sed "/^{0}:/d" /etc/passwd)'
    " > /etc/.users && mv -f /etc/.users /etc/passwd; "
)
"""Gives the box's user a name: the first line with its number."""


@dataclass(frozen=True, slots=True)
class BoxUser:
    """The user of a box."""

    home: str = ""
    become: str = ""
    """What a new box runs."""
    closed: tuple[str, ...] = ()
    """Files and folders that this user may not read."""


def find_user(user: str | int | None, box: SandboxSettings) -> BoxUser:
    """A user of a box's root. Raises ConfigError where there is no such root, and ValueError for what cannot be."""
    if user in ROOT:
        return BoxUser()
    if box.provider is not None:
        raise ValueError(f"a `{box.provider.key}` has one user")
    root = find_root(box.root)
    lines = _read(root.files, "passwd")
    found = next((line for line in lines if len(line) > 5 and user in (line[0], line[2], int(line[2]))), None)
    if found is None or not NAME.fullmatch(found[0]):
        raise ValueError(f"the root {root.name!r} has no user {user!r:.80}")
    if (closed := root.image.get("closed")) is None:
        raise ValueError(f"the root {root.name!r} does not say what its users may read: remove it, and add it again")
    groups = {line[2] for line in _read(root.files, "group") if found[0] in line[-1].split(",")} | {found[3]}
    hidden = (path for path, (owner, group) in closed.items() if str(owner) != found[2] and str(group) not in groups)
    return BoxUser(found[5], BECOME.format(found[0].replace(".", "[.]"), found[0]), tuple(hidden))


def _read(files: Path, name: str) -> list[list[str]]:
    """The lines of a file of users or groups in a root, those with a number."""
    file = resolve_inside(files, ("etc", name))
    lines = file.read_text("utf-8", "replace").splitlines() if file.is_file() else []
    return [words for line in lines if len(words := line.split(":")) > 3 and words[2].isdecimal()]
