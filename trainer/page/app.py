"""The page and its data over HTTP: whatever is asked for is read when it is asked for, and in a thread.

/ui/                              the page, and its files beside it
/v1/runs                          what is shown, with its settings
/v1/runs/RUN/metrics?from=BYTE    what was measured since
/v1/runs/RUN/alarms               what was alarming
/v1/runs/RUN/rollouts?...         a page of the table; see `query.py`
/v1/runs/RUN/choices              what it can be filtered by
/v1/runs/RUN/rollouts/N           one, token by token
/v1/runs/RUN/group?name=GROUP     siblings side by side
/v1/runs/RUN/blobs/SHA256         a picture
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway.http.endpoint import nowhere
from gateway.http.guard import Guard
from gateway.http.reply import Problem, Reply, json_reply, not_found
from gateway.http.settings import Settings
from gateway.page.files import SHARED, piece
from trainer.page.query import Unclear, query, whole
from trainer.page.runs import Missing, Run
from trainer.run.file import RunError

HERE = "trainer.page"
PAGE = "index.html"
SEALED = ((b"content-security-policy", b"default-src 'none'; sandbox"), (b"content-disposition", b"attachment"))
"""What a tool sent is never a page of ours."""

Answer = Callable[[Run, Request], Any]


def app(runs: Sequence[Run], settings: Settings) -> ASGIApp:
    known = {run.name: run for run in runs}
    routes = [Route(path, _asked(known, answer), methods=["GET"]) for path, answer in ANSWERS.items()]
    routes += [
        Route("/v1/runs", _listed(runs), methods=["GET"]),
        Route("/", _home, methods=["GET"]),
        Route("/ui", _home, methods=["GET"]),
        Route("/ui/", _file, methods=["GET"]),
        Route("/ui/{name}", _file, methods=["GET"]),
    ]
    return Guard(Router(routes, redirect_slashes=False, default=nowhere), settings)


async def _home(request: Request) -> ASGIApp:
    return RedirectResponse("/ui/")


async def _file(request: Request) -> ASGIApp:
    found = piece(request.path_params.get("name", PAGE), HERE, SHARED)
    return found or not_found(request.url.path).reply


def _listed(runs: Sequence[Run]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> ASGIApp:
        return json_reply(await to_thread.run_sync(lambda: {"runs": [run.told() for run in runs]}))

    return answer


def _asked(known: Mapping[str, Run], answer: Answer) -> Callable[[Request], Any]:
    async def asked(request: Request) -> ASGIApp:
        run = known.get(request.path_params["run"])
        if run is None:
            return not_found(request.url.path).reply
        try:
            found = await to_thread.run_sync(answer, run, request)
        except Missing as error:
            return Problem(404, "not_found", str(error)).reply
        except Unclear as error:
            return Problem(422, "invalid_request", str(error)).reply
        except RunError as error:
            problem, _, remedy = str(error).partition("\n  remedy: ")
            return Problem(409, "conflict", problem, remedy=remedy).reply
        return (
            Reply(found, kind=b"application/octet-stream", headers=SEALED)
            if isinstance(found, bytes)
            else json_reply(found)
        )

    return asked


def _metrics(run: Run, request: Request) -> Any:
    return run.metrics(
        whole("`from`, a place in the file as an answer gave it,", request.query_params.get("from", "0"))
    )


def _rollout(run: Run, request: Request) -> Any:
    return run.rollout(whole("a rollout's number", request.path_params["place"]))


ANSWERS: Mapping[str, Answer] = {
    "/v1/runs/{run}/metrics": _metrics,
    "/v1/runs/{run}/alarms": lambda run, request: run.alarms(),
    "/v1/runs/{run}/choices": lambda run, request: run.choices(),
    "/v1/runs/{run}/rollouts": lambda run, request: run.rollouts(query(request.query_params)),
    "/v1/runs/{run}/rollouts/{place}": _rollout,
    "/v1/runs/{run}/group": lambda run, request: run.group(request.query_params.get("name", "")),
    "/v1/runs/{run}/blobs/{digest}": lambda run, request: run.blob(request.path_params["digest"]),
}
