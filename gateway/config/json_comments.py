"""Blanks comments and trailing commas in JSON, as editors' settings files have them. Line numbers stay the same."""

from __future__ import annotations

import re

STRING = r'"(?:[^"\\\n]|\\.)*"'
COMMENT_PATTERN = re.compile(rf"(?P<kept>{STRING})|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
TRAILING_COMMA_PATTERN = re.compile(rf"(?P<kept>{STRING})|,(?=\s*[}}\]])")


def blank_json_comments(text: str) -> str:
    """The text as plain JSON, with spaces in place of comments and of commas after the last item."""
    return TRAILING_COMMA_PATTERN.sub(_blank, COMMENT_PATTERN.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    return match["kept"] or re.sub(r"[^\n]", " ", match[0])
