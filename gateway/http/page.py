"""/ui: what the gateway is and does, for a person with a browser; the page itself tells nothing and needs no token."""

from __future__ import annotations

from starlette.types import ASGIApp

from gateway.http.asked import Asked
from gateway.http.desk import Desk
from gateway.http.reply import not_found
from gateway.page.files import SHARED, piece

PAGE = "gateway.html"


async def page(desk: Desk, asked: Asked) -> ASGIApp:
    return piece(PAGE, SHARED) or not_found("/ui").reply


async def file(desk: Desk, asked: Asked) -> ASGIApp:
    name = asked.path["id"]
    found = piece(name, SHARED)
    if found is None:
        raise not_found(f"/ui/{name}")
    return found
