"""Removes a folder with all that is in it, even what a program made unwritable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def remove_folder(folder: Path) -> None:
    """Removes what can be removed; follows no link."""

    def make_writable(function: Callable[..., Any], path: str, _: Any) -> None:
        with suppress(OSError):
            for item in (os.path.dirname(path), path):
                if not os.path.islink(item):  # A program may have led it to a file that is not its own.
                    os.chmod(item, 0o700)
            function(path)

    with suppress(OSError, RecursionError):
        shutil.rmtree(folder, onerror=make_writable)
