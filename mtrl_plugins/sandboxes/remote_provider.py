"""Sandboxes on other machines, over HTTP: start, run, put, get, stop, and a sign of life that renews a lease.

When this process ends, however it ends, its signs of life end, and the server stops its sandboxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2

from gateway.errors import Unavailable
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled, answer_time_s
from gateway.sandbox.large_messages import (
    decode_base64,
    encode_base64,
    encode_message,
    get_pieces,
    parse_message,
    split_pieces,
)
from gateway.sandbox.provider import FILE_S, MARGIN_S, MOST_IMAGES, Completed, FrozenFiles
from gateway.sandbox.sandbox_settings import SandboxSettings
from mtrl_plugins.sandboxes import machines
from mtrl_plugins.sandboxes.heartbeats import HEARTBEATS
from mtrl_plugins.sandboxes.machines import (
    Machine,
    Machines,
    describe_answer,
    describe_error,
    open_client,
    post_watched,
)
from mtrl_plugins.sandboxes.settings import RemoteSettings

START_S, STOP_S, LOST_STOP_S, LEAST_WAIT_S = 120.0, 10.0, 1.0, 0.1
ANSWER_SHARE = 0.9
"""Share of a call's time in which the server must answer; the rest is for the way."""
END_S, END_SHARE = 2.5, 0.3
"""Of the server's time, what it has to end a run that is over its limit and to tell what it printed."""
NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
NOT_FOUND, FULL = 404, 429


class RemoteProvider:
    """Starts sandboxes on the least loaded of the machines; on others, where one fails."""

    mounts_states = False

    def __init__(self, remote: RemoteSettings) -> None:
        self._machines = Machines(remote)

    async def start(
        self,
        settings: SandboxSettings,
        state: Path | None = None,
        *,
        keeps_files: bool = False,
        files_of: FrozenFiles | None = None,
    ) -> RemoteSandbox:
        frozen = files_of.sandbox if isinstance(files_of, RemoteFiles) else None
        body: dict[str, Any] = {"settings": settings.model_dump(mode="json", exclude={"container", "remote"})}
        body |= {"keeps_files": keeps_files, "files_of": frozen and frozen.url.rpartition("/")[2]}
        began, tried, sandbox = anyio.current_time(), dict[Machine, str](), None
        wait_s = min(machines.QUEUE_S, (anyio.current_effective_deadline() - began) / 2)
        try:
            with anyio.fail_after(START_S):
                while sandbox is None:
                    machine = await self._machines.choose(tried, frozen.machine if frozen else None)
                    left_s = began + wait_s - anyio.current_time()
                    body["wait_s"] = max(LEAST_WAIT_S, min(machines.TURN_S, left_s))
                    sandbox, is_full = await self._start_on(machine, settings, body, tried)
                    if is_full and left_s <= machines.TURN_S:
                        raise Unavailable(self._machines.describe_full(wait_s))
        except BaseException as error:
            statistics.STATISTICS.refusals += 1
            if isinstance(error, TimeoutError):
                raise Unavailable(f"no sandbox was started within {START_S:g} s") from error
            raise
        statistics.count_start(anyio.current_time() - began, sandbox.machine.name)
        HEARTBEATS.add(sandbox.url, sandbox.machine.headers, sandbox.lease_s)
        return sandbox

    async def _start_on(
        self, machine: Machine, settings: SandboxSettings, body: Mapping[str, Any], tried: dict[Machine, str]
    ) -> tuple[RemoteSandbox | None, bool]:
        """A sandbox of a machine, or whether it has no room. One that fails is set aside, or `tried` has the reason."""
        http, sandbox, is_full = open_client(), None, False
        try:
            answer = await post_watched(http, machine, machine.url, await encode_message(body))
            if answer.is_success:
                sandbox = RemoteSandbox(http, machine, settings, await parse_message(answer.content))
                sandbox.keeps_files = bool(body["keeps_files"])
            elif answer.status_code == FULL:
                is_full = True
            else:
                machine.failed_at, tried[machine] = anyio.current_time(), describe_answer(answer)
        except httpx2.HTTPError as error:
            tried[machine] = describe_error(error)
            machine.set_aside(tried[machine])
        except (ValueError, KeyError, TypeError, RecursionError):
            tried[machine] = "it sent an answer that cannot be read"
        finally:
            if sandbox is None:
                machine.running -= 1
                with anyio.CancelScope(shield=True):
                    await http.aclose()
        return sandbox, is_full


class RemoteSandbox:
    """A sandbox on a server."""

    def __init__(
        self,
        http: httpx2.AsyncClient,
        machine: Machine,
        settings: SandboxSettings,
        started: Mapping[str, Any],
    ) -> None:
        self.url, self.machine = f"{machine.url}/{started['id']}", machine
        self.lease_s = float(started["lease_s"])
        self.python: Sequence[str] = tuple(map(str, started["python"]))
        self.keeps_files = False
        """Whether its files are there until it is stopped, even if its processes have ended."""
        self._http, self._settings = http, settings
        self._is_stopped, self._has_ended, self._failure, self._has_place = False, False, "", True
        self._lock = anyio.Lock()

    @property
    def alive(self) -> bool:
        return not self._is_stopped and not self._has_ended

    @property
    def has_ended(self) -> bool:
        """Its server tells, at the next request."""
        return False

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float) -> Completed:
        request = {"command": list(command), "stdin": await encode_base64(stdin)}
        return await self._completed(await self._ask("run", request, timeout_s))

    async def run_python(self, code: str, timeout_s: float) -> Completed:
        return await self._completed(await self._ask("run", {"code": code}, timeout_s))

    async def put(self, path: str, data: bytes, *, append: bool = False) -> None:
        for piece, follows in split_pieces(data, append=append):
            await self._ask("put", {"path": path, "data": await encode_base64(piece), "append": follows}, FILE_S)

    async def get(self, path: str, max_bytes: int) -> bytes:
        return await get_pieces(self.get_piece, path, max_bytes)

    async def get_piece(self, path: str, max_bytes: int, offset: int) -> tuple[bytes, bool]:
        reply = await self._ask("get", {"path": path, "max_bytes": max_bytes, "offset": offset}, FILE_S)
        try:
            return (await decode_base64(reply["data"]))[: max_bytes - offset], reply.get("is_end") is not False
        except (ValueError, KeyError, TypeError) as error:
            raise await self._lost("it sent an answer that cannot be read") from error

    async def end(self) -> None:
        """Uses it no more; the server ends its processes when it is frozen, if it has not."""
        self._has_ended = True
        if not self.keeps_files:
            await self.stop()

    async def stop(self) -> None:
        """Stops it. Where the server does not answer, the lease ends it."""
        if self._is_stopped:
            return
        self._is_stopped = True
        statistics.count_end(self.machine.name)
        HEARTBEATS.remove(self.url)
        with anyio.move_on_after(LOST_STOP_S if self.machine.problem else STOP_S, shield=True):
            with suppress(httpx2.HTTPError):
                await self._http.delete(self.url, headers=self.machine.headers)
            await self._http.aclose()
        self._free()

    async def freeze(self) -> FrozenFiles:
        await self._ask("freeze", {}, FILE_S)
        self._free()
        return RemoteFiles(self)

    def _free(self) -> None:
        """Another one may have its place: frozen files take none."""
        if self._has_place:
            self._has_place = False
            self.machine.running -= 1

    async def _completed(self, reply: Mapping[str, Any]) -> Completed:
        most, status = self._settings.output_bytes, reply.get("status")
        try:
            images = tuple([await decode_base64(image) for image in (reply.get("images") or [])[:MOST_IMAGES]])
        except (ValueError, TypeError) as error:
            raise await self._lost("it sent an answer that cannot be read") from error
        return Completed(
            str(reply.get("stdout", ""))[:most],
            str(reply.get("stderr", ""))[:most],
            status if isinstance(status, int) else None,
            str(reply.get("stopped", "")),
            images,
            reply.get("is_lost") is True,
            tuple(map(str, reply.get("refusals") or ())),
        )

    async def _ask(self, verb: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Asks the server. A failure of it, or of the way to it, is never the policy's."""
        within_s = min(timeout_s + MARGIN_S, answer_time_s())
        answer_s = within_s * ANSWER_SHARE
        run_s = min(timeout_s, answer_s - min(END_S, END_SHARE * answer_s))
        body = {**request, "timeout_s": run_s, "answer_within_s": answer_s}
        async with self._lock:
            if self._failure:
                raise SandboxKilled(self._failure)
            if self._is_stopped or (self._has_ended and verb != "freeze"):
                raise SandboxEnded("it has been stopped")
            try:
                with anyio.fail_after(within_s):
                    content = await encode_message(body)
                    answer = await post_watched(self._http, self.machine, f"{self.url}/{verb}", content)
            except NOT_SENT as error:
                self.machine.set_aside(describe_error(error))
                reason = f"{self.machine.name} cannot be reached: {describe_error(error)}"
                await self._lost(reason)
                raise Unavailable(reason) from error
            except (httpx2.HTTPError, TimeoutError) as error:
                raise await self._lost(describe_error(error)) from error
            except BaseException:
                await self.end()
                raise
            return await self._read(answer)

    async def _read(self, answer: httpx2.Response) -> dict[str, Any]:
        if not answer.is_success:
            gone = "the sandbox is not there any more: " if answer.status_code == NOT_FOUND else ""
            reason = gone + describe_answer(answer)
            await self._lost(reason)
            raise Unavailable(reason)
        try:
            reply = await parse_message(answer.content)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise await self._lost("it sent an answer that cannot be read")
        if "ended" in reply:
            await self.end()
            raise SandboxEnded(str(reply["ended"]))
        if "killed" in reply:
            raise await self._lost(str(reply["killed"]))
        if "error" in reply:
            raise OSError(str(reply["error"]))
        return reply

    async def _lost(self, reason: str) -> SandboxKilled:
        """Stops it: nobody knows what was done."""
        self._failure = f"the server of sandboxes at {self.machine.name} failed: {reason}"
        await self.stop()
        return SandboxKilled(self._failure)


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """The files that a sandbox on a server has left; they are there as long as the sandbox would be."""

    sandbox: RemoteSandbox

    async def close(self) -> None:
        await self.sandbox.stop()
