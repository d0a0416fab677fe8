"""Answers over HTTP as the Hugging Face hub does, to its own client: repositories of files, and commits to them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

SHA, TOKEN = "c0ffee" + "0" * 34, "hf_good"
REFUSALS = {"gated": (403, "GatedRepo"), "missing": (401, "RepoNotFound")}


@dataclass
class Hub:
    """Repositories by kind and name, such as `models/org/tiny`, each with its files; and what was asked."""

    repos: dict[str, dict[str, bytes]]
    asked: list[str] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("api/").split("/")
        is_file = not path.startswith("api/")
        if is_file and parts[0] != "datasets":
            parts = ["models", *parts]
        if path == "api/whoami-v2":
            return self._send(200, {"name": "me"}) if self._is_known() else self._send(401, {"error": "no"})
        if len(parts) < 3:
            is_new = path == "api/repos/create"
            return self._create(json.loads(body)) if is_new else self._send(200, {"errors": [], "warnings": []})
        name, rest = "/".join(parts[:3]), parts[3:]
        refusal = REFUSALS.get(parts[2], None if name in self.hub.repos else REFUSALS["missing"])
        if refusal is not None:
            return self._send(refusal[0], {"error": "no"}, {"X-Error-Code": refusal[1]})
        files = self.hub.repos[name]
        if is_file:
            self._send_file(files.get("/".join(rest[2:])))
        else:
            self._answer_api(parts, rest, files, body)

    def _answer_api(self, parts: list[str], rest: list[str], files: dict[str, bytes], body: bytes) -> None:
        match rest:
            case [] | ["revision", "main" | "v2" | "c0ffee0000000000000000000000000000000000"]:
                siblings = [{"rfilename": file} for file in files]
                return self._send(200, {"id": "/".join(parts[1:3]), "sha": SHA, "siblings": siblings, "tags": []})
            case ["revision", _]:
                return self._send(404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
            case ["tree" | "paths-info", *_]:
                return self._send(200, [describe(file, text) for file, text in files.items()])
            case ["preupload", *_]:
                sent = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in sent]
                return self._send(200, {"files": modes})
            case ["commit", *_]:
                lines = [json.loads(line) for line in body.splitlines()]
                added = [line["value"] for line in lines if line["key"] == "file"]
                files |= {file["path"]: base64.b64decode(file["content"]) for file in added}
                return self._send(
                    200,
                    {
                        "commitUrl": f"{self.hub.url}/{parts[1]}/{parts[2]}/commit/{SHA}",
                        "commitOid": SHA,
                        "success": True,
                    },
                )
        return self._send(404, {"error": "no"})

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _create(self, wanted: dict[str, Any]) -> None:
        if not self._is_known():
            return self._send(401, {"error": "Invalid username or password."})
        self.hub.made.append(wanted)
        name = f"{wanted.get('organization', 'me')}/{wanted['name']}"
        self.hub.repos.setdefault(f"models/{name}", {})
        return self._send(200, {"url": f"{self.hub.url}/{name}", "id": name})

    def _send_file(self, text: bytes | None) -> None:
        if text is None:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{hashlib.sha256(text).hexdigest()}"', "X-Repo-Commit": SHA}
        return self._send_bytes(200, text, headers | {"Content-Type": "application/octet-stream"})

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send_bytes(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def describe(file: str, text: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}


@contextmanager
def running_hub(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub with these repositories, on a free port of this machine."""
    hub = Hub(repos)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
