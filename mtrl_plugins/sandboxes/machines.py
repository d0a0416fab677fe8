"""The machines of `remote`: which ones answer, how full each is, and which one starts the next sandbox.

Each machine tells itself how many sandboxes it runs and may run, so that several gateways can share them. A sandbox
stays on the machine that started it.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio import to_thread

from gateway.errors import ConfigError, Unavailable
from mtrl_plugins.sandboxes.heartbeats import make_tls
from mtrl_plugins.sandboxes.settings import SANDBOXES_VARIABLE, RemoteSettings

log = logging.getLogger(__name__)

PATH = "/v1/sandboxes"
LOOK_S, LOOK_WITHIN_S = 1.0, 2.0
"""How often machines are asked how full they are while sandboxes are started, and the time for an answer."""
RETRY_S, MAX_RETRY_S = 10.0, 60.0
"""When a machine that failed is asked again; each further failure doubles it."""
RESOLVE_S, FIRST_RESOLVE_S = 10.0, 10.0
"""How often names are resolved, since machines come and go behind one; and the time for the first answer."""
QUEUE_S, TURN_S = 60.0, 10.0
"""How long a start waits for room, but no longer than half of the time that its call has left; and how long in a
machine's queue, before it looks for a shorter one."""
SILENT_S, PROBES = 5.0, 3
"""A request that takes longer asks whether the machine is there at all; this many questions may stay unanswered."""
LATE = "it did not answer in time"
MAX_PROBLEMS = 5
CHECK_S, CHECKED_AT_ONCE = 10.0, 32
"""How long a machine has to answer before a run begins, and how many are asked at a time."""
UNAUTHORIZED = 401


@dataclass(eq=False, slots=True)
class Machine:
    """A server of sandboxes."""

    url: str
    """The address of its sandboxes."""
    address: str
    """The one of `remote` that leads to it."""
    headers: Mapping[str, str]
    """Those of each request: the token, and the host as it was named, since the address may be an IP."""
    running: int = 0
    """Its sandboxes, and starts that wait for room, as it said itself; and those from here since."""
    most: int = 0
    problem: str = ""
    """Why it gets no new sandboxes for now."""
    asked_at: float = -RETRY_S
    pause_s: float = 0.0
    """How long after `asked_at` it is asked again."""
    failed_at: float = -RETRY_S
    """When it answered that it could not start one: others are tried first for a while."""

    @property
    def name(self) -> str:
        """Its name in metrics."""
        return urlsplit(self.url).netloc

    @property
    def may_start(self) -> bool:
        """Whether it may be chosen while machines are asked how full they are."""
        return self.problem == LATE or (self.most > 0 and not self.problem)

    @property
    def load(self) -> float:
        """How full it is; more than 1 where starts wait. One that has just failed counts as full."""
        return self.running / max(1, self.most) + (anyio.current_time() - self.failed_at < RETRY_S)

    def set_aside(self, problem: str) -> None:
        """Gives it no new sandboxes until it answers again."""
        if not self.problem:
            log.warning("%s gets no new sandboxes: %s", self.name, problem)
            self.asked_at, self.pause_s = anyio.current_time(), RETRY_S
        self.problem = problem

    def take_count(self, counts: Mapping[str, object]) -> None:
        """Takes what it says of itself."""
        running, most = counts["running"], counts["most"]
        if not isinstance(running, int) or not isinstance(most, int) or most < 1:
            raise ValueError("it is no server of sandboxes")
        if self.problem:
            log.warning("%s gets new sandboxes again", self.name)
        self.running, self.most, self.problem, self.pause_s = running, most, "", LOOK_S


class Machines:
    """Chooses among all machines that the addresses of `remote` lead to."""

    def __init__(self, remote: RemoteSettings) -> None:
        self._remote = remote
        self._known: dict[str, Machine] = {}
        self._resolved_at = -RESOLVE_S
        self._turn = anyio.Lock()

    async def choose(self, tried: Mapping[Machine, str], only: Machine | None = None) -> Machine:
        """The least loaded machine, or `only` this one, with a place in its queue taken; raises Unavailable."""
        machines = [*self._known.values()] if only is None else [only]
        if not self._turn.locked() or not any(one.may_start and one not in tried for one in machines):
            async with self._turn:
                machines = await self._look(only)
        usable = [machine for machine in machines if not machine.problem and machine not in tried]
        if not usable:  # Where all are busy, a late one may still start it.
            usable = [machine for machine in machines if machine.problem == LATE and machine not in tried]
        if not usable:
            raise Unavailable(f"no sandbox was started: {_describe_problems(machines, tried)}")
        random.shuffle(usable)  # Other gateways choose, too.
        chosen = min(usable, key=lambda machine: machine.load)
        chosen.running += 1
        return chosen

    def describe_full(self, wait_s: float) -> str:
        """That none had room for so long, and what to do."""
        full = [machine for machine in self._known.values() if not machine.problem]
        names = full[0].name if len(full) == 1 else f"{len(full)} machines"
        text = f"all {sum(machine.most for machine in full)} sandboxes of {names} are in use"
        remedy = "start more servers of sandboxes, raise their --most, or lower `concurrency.inflight_rollouts`"
        return f"{text}, and none became free within {wait_s:.0f} s: {remedy}"

    async def _look(self, only: Machine | None) -> list[Machine]:
        """Asks the machines that were not asked for a while; all that failed, if no other is left."""
        now = anyio.current_time()
        if now - self._resolved_at >= RESOLVE_S:
            self._resolved_at = now
            within_s = LOOK_WITHIN_S if self._known else FIRST_RESOLVE_S  # After it, known ones stay.
            with anyio.move_on_after(within_s):
                found = await to_thread.run_sync(
                    find_machines, self._remote, [*self._known.values()], abandon_on_cancel=True
                )
                self._known = {machine.url: self._known.get(machine.url) or machine for machine in found}
        machines = [*self._known.values()] if only is None else [only]
        are_lost = all(machine.problem for machine in machines)
        due = [one for one in machines if now - one.asked_at >= (LOOK_S if are_lost else one.pause_s)]
        if due:
            async with open_client() as http, anyio.create_task_group() as tasks:
                for machine in due:
                    tasks.start_soon(_ask, http, machine)
        return machines


async def _ask(http: httpx2.AsyncClient, machine: Machine) -> None:
    if machine.problem:
        machine.pause_s = min(MAX_RETRY_S, 2 * machine.pause_s)
    try:
        with anyio.fail_after(LOOK_WITHIN_S):
            answer = await http.get(machine.url, headers=machine.headers)
        if answer.is_success:
            machine.take_count(answer.json())
        else:
            machine.set_aside(describe_answer(answer))
    except (httpx2.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
        machine.set_aside(describe_error(error))
    machine.asked_at = anyio.current_time()


async def post_watched(http: httpx2.AsyncClient, machine: Machine, url: str, content: bytes) -> httpx2.Response:
    """Posts, and waits for the answer as long as the machine answers other requests: one that hangs, or is cut off,
    never ends a connection by itself. Raises httpx2.HTTPError."""
    answer: httpx2.Response | httpx2.HTTPError = httpx2.ReadTimeout("the machine does not answer any more")

    async def watch() -> None:
        await anyio.sleep(SILENT_S)
        silent = 0
        while silent < PROBES:
            try:
                with anyio.fail_after(SILENT_S):
                    await http.get(machine.url, headers=machine.headers)
                silent = 0
                await anyio.sleep(SILENT_S)
            except (httpx2.HTTPError, TimeoutError):
                silent += 1
        machine.set_aside("it does not answer any more")
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            answer = await http.post(url, content=content, headers=machine.headers)
        except httpx2.HTTPError as error:
            answer = error
        tasks.cancel_scope.cancel()
    if isinstance(answer, httpx2.HTTPError):
        raise answer
    return answer


def find_machines(remote: RemoteSettings, known: Collection[Machine] = ()) -> list[Machine]:
    """All machines. Each address that a name of plain HTTP stands for is one, and stays the same when others follow; a
    name of HTTPS stays a name, for which its certificate is. A name that cannot be resolved keeps its known ones."""
    token = {"authorization": f"Bearer {remote.sent_token}"} if remote.sent_token else {}
    machines: dict[str, Machine] = {}
    for address in remote.urls:
        parts = urlsplit(address)
        hosts = _resolve(parts.hostname or "", parts.port or 80) if parts.scheme == "http" else []
        if hosts is None and (kept := {one.url: one for one in known if one.address == address}):
            machines |= kept
            continue
        for netloc in [f"{host}:{parts.port or 80}" for host in hosts or ()] or [parts.netloc]:
            url = parts._replace(netloc=netloc, path=parts.path.rstrip("/") + PATH).geturl()
            machines[url] = Machine(url, address, {"content-type": "application/json", "host": parts.netloc, **token})
    return [*machines.values()]


def _resolve(host: str, port: int) -> list[str] | None:
    """The addresses of a name: those of IPv4 where it has both kinds; none where it has one of each, which may be one
    machine's. None if nobody tells."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:  # Whoever connects to it tells why.
        return None
    four, six = sorted(one for one in found if ":" not in one), sorted(f"[{one}]" for one in found if ":" in one)
    return [] if len(four) == len(six) == 1 else four or six


def find_remote_problem(remote: RemoteSettings) -> str | None:
    """Why no machine can be used, with what to do; None if one can: the others are told in the log."""
    machines = find_machines(remote)
    if not machines:
        return f"`remote` has no `url`, and {SANDBOXES_VARIABLE} is not set\n  remedy: write one of them"
    with (
        httpx2.Client(timeout=CHECK_S, trust_env=False, verify=make_tls()) as http,
        ThreadPoolExecutor(min(CHECKED_AT_ONCE, len(machines))) as threads,
    ):
        problems = [problem for problem in threads.map(partial(_find_problem, http), machines) if problem]
    if len(problems) == len(machines):
        others = f" ({len(problems) - 1} more machines fail)" if len(problems) > 1 else ""
        return problems[0].replace("\n", f"{others}\n", 1)
    for problem in problems[:MAX_PROBLEMS]:
        log.warning("a machine is lost, of %d: %s", len(machines), problem)
    return None


def wait_for_machine(remote: RemoteSettings, within_s: float) -> None:
    """Returns once one can be used; raises ConfigError at the deadline."""
    end = time.monotonic() + within_s
    while problem := find_remote_problem(remote):
        if time.monotonic() >= end:
            raise ConfigError(f"none can be used within {within_s:g} s: {problem}", field="sandboxes")
        time.sleep(LOOK_S)


def _find_problem(http: httpx2.Client, machine: Machine) -> str:
    """Why a machine cannot be used; empty if it can."""
    url = machine.url.removesuffix(PATH)
    try:
        answer = http.get(machine.url, headers=machine.headers)
        if answer.is_success:
            machine.take_count(answer.json())
            return ""
        remedy = "correct `token`" if answer.status_code == UNAUTHORIZED else "see the server's log"
        return f"{url}: {describe_answer(answer)}\n  remedy: {remedy}"
    except httpx2.HTTPError as error:
        return f"{url} cannot be reached: {describe_error(error)}\n  remedy: start `mtrl-gateway sandboxes` there"
    except (ValueError, KeyError, TypeError):
        return f"{url} is no server of sandboxes\n  remedy: correct `url`"


def open_client() -> httpx2.AsyncClient:
    """A client for machines; whoever uses it sets deadlines."""
    return httpx2.AsyncClient(timeout=None, trust_env=False, verify=make_tls())


def describe_answer(answer: httpx2.Response) -> str:
    """An answer that is no success, for people."""
    try:
        error = answer.json()["error"]
        return f"HTTP {answer.status_code}: {error['message']} {error.get('remedy', '')}".rstrip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {answer.status_code}"


def describe_error(error: BaseException) -> str:
    """An error of a request, for people."""
    return LATE if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _describe_problems(machines: Collection[Machine], tried: Mapping[Machine, str]) -> str:
    shown = [f"{one.name}: {one.problem or tried[one]}" for one in [*machines][:MAX_PROBLEMS]]
    more = len(machines) - len(shown)
    return "; ".join(shown or [f"no name of `url`, or of {SANDBOXES_VARIABLE}, is resolved"]) + (
        f"; and {more} more machines" if more > 0 else ""
    )
