"""Keeps what differs from process to process out of texts for a policy: memory addresses and temporary folders.

Equal rollouts must read equal tokens. The law holds for what we write, such as notes, errors and objects as text, and
not for what a tool itself returns as text.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache

_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]{6,16}\b")
"""As `<_io.BytesIO object at 0x7f3c5c0e1b20>` has one."""
_QUOTED_PATH = re.compile(r"(['\"])(?:/[^'\"/\n]*)*/([^'\"/\n]+)\1")


def repeatable(text: str) -> str:
    """The text without memory addresses, and without random temporary folders in front of file names."""
    if " 0x" in text:
        text = _ADDRESS.sub("", text)
    return _temporary_folder().sub("", text) if "/" in text else text


def repeatable_note(text: str) -> str:
    """A note of ours, in which a file is named without its folder, too."""
    return _QUOTED_PATH.sub(r"\1\2\1", repeatable(text)) if "/" in text else repeatable(text)


@cache
def _temporary_folder() -> re.Pattern[str]:
    """Paths that begin with the temporary folder, up to and with the random name that Python or we chose in it."""
    return re.compile(rf"{re.escape(tempfile.gettempdir().rstrip('/'))}/(?:tmp|mtrl-)[\w-]+/?")
