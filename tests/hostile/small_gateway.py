"""A gateway in a process of its own, so that its memory and descriptors can be measured.

python -m tests.hostile.small_gateway '{"head_s": 1}'      # settings of the HTTP server
"""

from __future__ import annotations

import json
import sys

from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.http.uvicorn_server import run
from tests.http.api_client import http_sources

if __name__ == "__main__":
    run(Gateway(http_sources()), Settings.model_validate({"port": 0, **json.loads(sys.argv[1])}))
