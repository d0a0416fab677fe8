"""A stand-in for SGLang's Python: takes its command line, has a child, and becomes healthy or fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def stand_in(folder: Path, behaviour: str = "healthy") -> Path:
    """What `MTRL_SGLANG_PYTHON` may name."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {behaviour} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python


class Health(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        """Not at once: SGLang's own server answers before its model is there."""
        Health.asked += 1
        self.send_response(503 if Health.asked < 3 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(behaviour: str, words: list[str]) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    leading = {name: os.environ[name] for name in ("PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
    told = {"words": words, "pids": [os.getpid(), child.pid], "leading": leading}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    if behaviour == "dies":
        sys.exit("RuntimeError: there is no memory left")
    port = int(words[words.index("--port") + 1])
    server = HTTPServer(("127.0.0.1", port), Health)
    if behaviour == "hangs":
        child.wait()
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
