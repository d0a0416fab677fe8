"""The web UI of runs and its HTTP API under uvicorn. Every request reads the run's files, in a thread.

/ui/                              the page and its files
/v1/runs                          the runs with their settings
/v1/runs/RUN/metrics?from=BYTE    metrics since a position in the file, and what the run is doing now
/v1/runs/RUN/alarms               alarms
/v1/runs/RUN/notes                POST: notes and tags, kept in the run's folder
/v1/runs/RUN/rollouts?...         rows of the table of rollouts; see `search.py`
/v1/runs/RUN/choices              values to filter by
/v1/runs/RUN/steps?step=A-B       digests of steps: kinds, endings, outcomes, lengths; see `step_digest.py`
/v1/runs/RUN/rollouts/N           a rollout, token by token
/v1/runs/RUN/group?name=GROUP     all rollouts of a group
/v1/runs/RUN/blobs/SHA256         an image or other media

A background task per run indexes new rollouts.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway.http.endpoint import not_found_app
from gateway.http.exchange import Problem, Response, json_response, not_found
from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings, check_token_required
from gateway.http.uvicorn_server import Server, bind_socket, make_uvicorn_config, server_url
from gateway.web.static_files import SHARED_PACKAGE, find_file
from mtrl_plugins.web.notes import Notes
from mtrl_plugins.web.runs import NotFound, ViewedRun
from mtrl_plugins.web.search import MAX_INT, InvalidQuery, parse_int, parse_query, parse_span
from trainer.storage.rollout_file import RunError

PACKAGE = "mtrl_plugins.web"
INDEX_HTML = "index.html"
DOWNLOAD_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; sandbox"),
    (b"content-disposition", b"attachment"),
)
"""Headers that keep a browser from showing a tool's bytes as a page of this site."""

Endpoint = Callable[[ViewedRun, Request, bytes], Any]
"""(run, request, its body) -> what is answered."""


def build_app(runs: Sequence[ViewedRun], settings: Settings) -> ASGIApp:
    """The ASGI app for the runs."""
    runs_by_name = {run.name: run for run in runs}
    routes = [Route(path, _run_endpoint(runs_by_name, answer), methods=["GET"]) for path, answer in ENDPOINTS.items()]
    routes += [
        Route("/v1/runs/{run}/notes", _run_endpoint(runs_by_name, _save_notes), methods=["POST"]),
        Route("/v1/runs", _list_runs(runs), methods=["GET"]),
        Route("/", _redirect_home, methods=["GET"]),
        Route("/ui", _redirect_home, methods=["GET"]),
        Route("/ui/", _serve_file, methods=["GET"]),
        Route("/ui/{name}", _serve_file, methods=["GET"]),
    ]
    return SecurityMiddleware(Router(routes, redirect_slashes=False, default=not_found_app), settings)


async def _redirect_home(request: Request) -> ASGIApp:
    return RedirectResponse("/ui/")


async def _serve_file(request: Request) -> ASGIApp:
    static_file = find_file(request.path_params.get("name", INDEX_HTML), PACKAGE, SHARED_PACKAGE)
    return static_file or not_found(request.url.path).response


def _list_runs(runs: Sequence[ViewedRun]) -> Callable[[Request], Any]:
    async def handle(request: Request) -> ASGIApp:
        return json_response(await to_thread.run_sync(lambda: {"runs": [run.to_dict() for run in runs]}))

    return handle


def _run_endpoint(runs_by_name: Mapping[str, ViewedRun], endpoint: Endpoint) -> Callable[[Request], Any]:
    async def handle(request: Request) -> ASGIApp:
        run = runs_by_name.get(request.path_params["run"])
        if run is None:
            return not_found(request.url.path).response
        try:
            body = await request.body() if request.method == "POST" else b""
            result = await to_thread.run_sync(endpoint, run, request, body)
        except ClientDisconnect:
            return Problem(400, "invalid_request", "The client left before the body was whole.").response
        except NotFound as error:
            return Problem(404, "not_found", str(error)).response
        except InvalidQuery as error:
            return Problem(422, "invalid_request", str(error)).response
        except RunError as error:
            problem, _, remedy = str(error).partition("\n  remedy: ")
            return Problem(409, "conflict", problem, remedy=remedy).response
        return (
            Response(result, content_type=b"application/octet-stream", headers=DOWNLOAD_HEADERS)
            if isinstance(result, bytes)
            else json_response(result)
        )

    return handle


def _save_notes(run: ViewedRun, request: Request, body: bytes) -> Any:
    try:
        notes = Notes.model_validate_json(body)
    except ValidationError as error:
        raise InvalidQuery(f"notes are a text and a list of tags: {error.errors()[0]['msg']}") from error
    return notes.save(run.folder)


def _metrics(run: ViewedRun, request: Request, body: bytes) -> Any:
    start = request.query_params.get("from", "0")
    return run.metrics(parse_int("`from`, a position in the file from an earlier response,", start))


def _span(request: Request) -> tuple[int, int]:
    step = request.query_params.get("step", "")
    return parse_span(step) if step else (0, MAX_INT)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/runs/{run}/metrics": _metrics,
    "/v1/runs/{run}/alarms": lambda run, request, body: run.alarms(),
    "/v1/runs/{run}/choices": lambda run, request, body: run.choices(),
    "/v1/runs/{run}/rollouts": lambda run, request, body: run.rollouts(parse_query(request.query_params)),
    "/v1/runs/{run}/rollouts/{place}": lambda run, request, body: run.rollout(
        parse_int("a rollout's number", request.path_params["place"])
    ),
    "/v1/runs/{run}/steps": lambda run, request, body: run.steps(*_span(request)),
    "/v1/runs/{run}/group": lambda run, request, body: run.group(request.query_params.get("name", "")),
    "/v1/runs/{run}/blobs/{digest}": lambda run, request, body: run.blob(request.path_params["digest"]),
}


log = logging.getLogger(__name__)

POLL_S = 0.5
"""The time between two checks for new rollouts."""
YIELD_S = 0.005
"""The pause between batches of an index update, for requests."""
SHUTDOWN_TIMEOUT_S = 2
"""The time that running requests have when the server stops."""

JOIN_TIMEOUT_S = 30.0
"""The time that the server's thread has to end, with a search or an index update under way."""


async def serve(
    runs: Sequence[ViewedRun], settings: Settings, ready: Callable[[str], None], *, stop: anyio.Event | None = None
) -> None:
    """Serves until `stop` is set or it is cancelled. Calls `ready` with the URL when it accepts connections."""
    check_token_required(settings)
    with bind_socket(settings) as listening, ExitStack() as stack:
        for run in runs:
            stack.callback(run.close)
        url = f"{server_url(settings, listening)}/ui/"
        server = Server(
            make_uvicorn_config(build_app(runs, settings), settings, shutdown_s=SHUTDOWN_TIMEOUT_S), lambda: ready(url)
        )
        async with anyio.create_task_group() as tasks:
            for run in runs:
                tasks.start_soon(_keep_indexing, run)
            if stop is not None:
                tasks.start_soon(_stop_on_event, server, stop)
            await server.serve([listening])
            tasks.cancel_scope.cancel()


@contextmanager
def serve_in_thread(runs: Sequence[ViewedRun], settings: Settings) -> Iterator[str]:
    """Serves in a background thread; yields the URL."""
    with start_blocking_portal() as portal:
        stop = portal.call(anyio.Event)

        async def start(*, task_status: TaskStatus[str]) -> None:
            await serve(runs, settings, task_status.started, stop=stop)

        served, url = portal.start_task(start)
        try:
            yield str(url)
        finally:
            portal.call(stop.set)
            served.result(JOIN_TIMEOUT_S)


async def serve_until_signal(runs: Sequence[ViewedRun], settings: Settings, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; a second signal cancels running requests."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:

            async def serve_then_cancel() -> None:
                await serve(runs, settings, ready, stop=stop)
                tasks.cancel_scope.cancel()

            tasks.start_soon(serve_then_cancel)
            async for _ in signals:
                if stop.is_set():
                    break
                stop.set()
            tasks.cancel_scope.cancel()


async def _stop_on_event(server: Server, stop: anyio.Event) -> None:
    await stop.wait()
    server.should_exit = True


async def _keep_indexing(run: ViewedRun) -> None:
    """Indexes new rollouts in small batches, so that requests are answered in between."""
    reported = ""
    while True:
        more = False
        try:
            more = await to_thread.run_sync(run.update_index)
        except Exception as error:  # boundary: a failing index must not end the server or the training
            if reported != f"{type(error).__name__}: {error}":
                reported = f"{type(error).__name__}: {error}"
                log.warning("%s: cannot index its rollouts for now (%s)", run.folder, reported)
        await anyio.sleep(YIELD_S if more else POLL_S)
