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

    tried: set[str] = set()

    def make_writable(function: Callable[..., Any], path: str, _: Any) -> None:
        if path in tried:
            return
        tried.add(path)
        for item in (path,) if path == str(folder) else (os.path.dirname(path), path):
            with suppress(OSError):
                if not os.path.islink(item):  # A program may have led it to a file that is not its own.
                    os.chmod(item, 0o700)
        with suppress(OSError):
            if function in (os.open, os.scandir):  # It could not be looked into.
                shutil.rmtree(path, onerror=make_writable)
            else:
                function(path)

    with suppress(OSError, RecursionError):
        shutil.rmtree(str(folder), onerror=make_writable)
