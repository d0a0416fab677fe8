"""Serves a web page's files from its Python package, with a Content-Security-Policy that allows no other source.

Independent of web frameworks: `find_file` returns an ASGI application.
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

SHARED_PACKAGE = "gateway.web"
"""The package with the files that all pages use."""
CONTENT_TYPES: Mapping[str, bytes] = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Browsers that support trusted types raise if text is used as markup by mistake.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS: Headers = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Cached but revalidated each time, so that a new version is used at once.
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as an ASGI application."""

    body: bytes
    content_type: bytes

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
        headers = ((b"etag", etag), *SECURITY_HEADERS)
        if etag in dict(scope["headers"]).get(b"if-none-match", b""):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        content = ((b"content-type", self.content_type), (b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": 200, "headers": (*content, *headers)})
        await send({"type": "http.response.body", "body": self.body})


@cache
def file_names(package: str) -> frozenset[str]:
    """Names of a package's files that a browser may load."""
    return frozenset(file.name for file in files(package).iterdir() if PurePosixPath(file.name).suffix in CONTENT_TYPES)


@cache
def _load_file(package: str, name: str) -> StaticFile:
    return StaticFile(files(package).joinpath(name).read_bytes(), CONTENT_TYPES[PurePosixPath(name).suffix])


def find_file(name: str, *packages: str) -> StaticFile | None:
    """The file in the first package that has it; the name is compared with a list and never used as a path."""
    return next((_load_file(package, name) for package in packages if name in file_names(package)), None)
