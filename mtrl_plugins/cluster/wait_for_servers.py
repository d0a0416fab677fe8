"""Waits until the SGLang servers of a job answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, build_opener

from gateway.errors import ConfigError

HEALTH_S = 30.0
"""A server's health endpoint may generate a token before it answers."""
PAUSE_S = 2.0
NOTE_EVERY_S = 60.0


def wait_for_servers(urls: Sequence[str], within_s: float, log: Callable[[str], None]) -> None:
    """Returns once all servers answer; raises at the deadline, with the names of those that did not."""
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            remedy = "write http://HOST:PORT"
            raise ConfigError(f"{url!r} is no address of a server", field="wait-for-servers", remedy=remedy)
    opener = build_opener(ProxyHandler({}))
    end, missing, problems, noted = time.monotonic() + within_s, list(urls), dict[str, str](), time.monotonic()
    while True:
        for url in list(missing):
            left = end - time.monotonic()
            if left > 0 and (problem := _problem(opener, url, min(HEALTH_S, left))):
                problems[url] = problem
            elif left > 0:
                missing.remove(url)
        if not missing:
            return
        if time.monotonic() >= end:
            names = ", ".join(f"{url} ({problems.get(url, 'not asked')})" for url in missing)
            remedy = "look into the logs of these servers"
            raise ConfigError(f"no answer within {within_s:g} s from {names}", field="servers", remedy=remedy)
        if time.monotonic() - noted >= NOTE_EVERY_S:
            noted = time.monotonic()
            log(f"{len(urls) - len(missing)} of {len(urls)} servers answer; waiting for {', '.join(missing)}")
        time.sleep(min(PAUSE_S, max(0.0, end - time.monotonic())))


def _problem(opener: OpenerDirector, url: str, timeout_s: float) -> str:
    """Why the server is not ready; empty if it is."""
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout_s):
            return ""
    except (OSError, HTTPException, ValueError) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
