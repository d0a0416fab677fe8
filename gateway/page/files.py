"""A page's files come from its package alone, and a browser is told to take nothing from anywhere else.

Known to no web framework, so that whoever serves can serve these: `piece` gives an ASGI application.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

Message = MutableMapping[str, Any]
Headers = tuple[tuple[bytes, bytes], ...]

SHARED = "gateway.page"
"""The package of what every page of ours uses."""
KINDS: Mapping[str, bytes] = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Text that is turned into markup by mistake raises instead, in browsers that know how.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
GUARDS: Headers = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Kept, and asked about each time: a new version is seen at once.
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of a page, as an ASGI application."""

    body: bytes
    kind: bytes

    @property
    def etag(self) -> bytes:
        return b'"%s"' % sha256(self.body).hexdigest()[:24].encode()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        etag = self.etag
        headers = ((b"etag", etag), *GUARDS)
        if etag in dict(scope["headers"]).get(b"if-none-match", b""):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        told = ((b"content-type", self.kind), (b"content-length", b"%d" % len(self.body)), *headers)
        await send({"type": "http.response.start", "status": 200, "headers": told})
        await send({"type": "http.response.body", "body": self.body})


@cache
def names(package: str) -> frozenset[str]:
    """The files of a package that a browser may have."""
    return frozenset(file.name for file in files(package).iterdir() if PurePosixPath(file.name).suffix in KINDS)


@cache
def _piece(package: str, name: str) -> Piece:
    return Piece(files(package).joinpath(name).read_bytes(), KINDS[PurePosixPath(name).suffix])


def piece(name: str, *packages: str) -> Piece | None:
    """The file of that name in the first package that has it; a name is compared, never opened unknown."""
    return next((_piece(package, name) for package in packages if name in names(package)), None)
