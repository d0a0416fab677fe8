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
        self.depth = 0 if earlier is None else earlier.depth + 1
        self.place = "" if earlier is None else earlier.place
        """Where they lie in their namespaces."""
        self.paths = ("", "") if earlier is None else earlier.own_paths
        """The files that lead to the namespaces of the earlier box."""
        self.own_paths = ("", "")
        self._stack = ExitStack()
        if earlier is not None:
            self.user = earlier.user
        else:
            self.user = self._stack.enter_context(unused_user()) if os.geteuid() == 0 else 0
        """Whose they are: a box that follows has the same user."""

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
