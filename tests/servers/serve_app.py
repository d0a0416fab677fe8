"""Serves routes from a thread, for tests whose own event loop must not be shared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

END_S = 10.0


@contextmanager
def serve_app(*routes: Route) -> Iterator[str]:
    """The origin at which the routes are served."""
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    with config.bind_socket() as listener:
        listener.listen(128)  # before the thread runs, so that nobody is refused
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(END_S)
