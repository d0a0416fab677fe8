"""The files of a rollout's boxes, which outlive their processes: descriptors keep the namespaces in which they lie.

They are gone with these descriptors, and so with the gateway, however that ends.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from gateway.sandbox.memory_files import descriptor_path
from gateway.sandbox.program_users import unused_user


class KeptFiles:
    """What keeps the files of one box; close it after the boxes that follow."""

    def __init__(self, earlier: KeptFiles | None = None) -> None:
        self.depth: int = 0 if earlier is None else earlier.depth + 1
        self.place: str = "" if earlier is None else earlier.place
        """Where they lie in their namespaces."""
        self.paths: tuple[str, str] = ("", "") if earlier is None else earlier.own_paths
        """The files that lead to the namespaces of the earlier box."""
        self.own_paths: tuple[str, str] = ("", "")
        self._stack = ExitStack()
        self.user: int = 0
        """Whose they are: a box that follows has the same user."""
        if earlier is not None:
            self.user = earlier.user
        elif os.geteuid() == 0:
            self.user = self._stack.enter_context(unused_user())

    @property
    def merged(self) -> str:
        """All files of the box, in its namespace."""
        return f"{self.place}{'/next' * self.depth}/merged"

    def hold(self, process: int) -> None:
        """Keeps the namespaces of a box, by the number of bubblewrap's outer process."""
        is_root = os.geteuid() == 0
        self.own_paths = ("" if is_root else self._open(process, "user"), self._open(process, "mnt"))

    def _open(self, process: int, kind: str) -> str:
        descriptor = os.open(Path("/proc", str(process), "ns", kind), os.O_RDONLY | os.O_CLOEXEC)
        self._stack.callback(os.close, descriptor)
        return descriptor_path(descriptor)

    def close(self) -> None:
        """Drops the files, once no process of a box uses them."""
        self._stack.close()
