"""/docs: one page that asks no other host for anything, and may not."""

from __future__ import annotations

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.types import ASGIApp

from gateway.http.asked import Asked
from gateway.http.desk import Desk
from gateway.http.openapi import document
from gateway.http.reply import Headers, Reply
from gateway.wire import dumps


async def docs(desk: Desk, asked: Asked) -> ASGIApp:
    page, headers = _page()
    return Reply(page, kind=b"text/html; charset=utf-8", headers=headers)


async def openapi(desk: Desk, asked: Asked) -> ASGIApp:
    return Reply(_document())


@cache
def _document() -> bytes:
    return dumps(document())


@cache
def _page() -> tuple[bytes, Headers]:
    """The page, and a policy that lets only its own script and style run, by their hashes."""
    page = files("gateway.http").joinpath("docs.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(page, 'style')}",
            f"script-src {_hash(page, 'script')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return page.encode(), ((b"content-security-policy", policy.encode()), (b"referrer-policy", b"no-referrer"))


def _hash(page: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    inside = found.group(1) if found else ""
    return f"'sha256-{base64.b64encode(sha256(inside.encode()).digest()).decode()}'"
