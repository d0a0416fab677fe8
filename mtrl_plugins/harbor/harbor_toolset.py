"""A session is one rollout of a Harbor task: the sandbox's tools, those of the task's MCP servers, and for the training
loop tools that begin the task, end a step with its tests, and play its solution."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import fsum, inf
from time import monotonic
from typing import Any, Self

import anyio
from anyio import to_thread

from gateway.config.models import Limits, Server
from gateway.errors import GatewayError, Unavailable
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.sandbox.choose_provider import choose_provider
from gateway.sandbox.command_server import TOO_LONG
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.grader import Grade, Grader, NoGrade, place_files
from gateway.sandbox.provider import Completed, Sandbox
from gateway.sandbox.sandbox_toolset import GRADE, SandboxSession, SandboxToolset, tool_spec
from gateway.schema import SchemaError, checker_for
from gateway.session import AnySession
from gateway.toolset import PLANTED, Session, add_prefix
from gateway.types import DEFAULT_CONTEXT, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from mtrl_plugins.harbor.boxes import AGENT_LOGS, ARTIFACTS, LOGS, MOST_S, TaskBoxes
from mtrl_plugins.harbor.settings import HarborSettings
from mtrl_plugins.harbor.task_file import StepTable

BEGIN, END_STEP, SOLVE = "harbor_begin", "harbor_end_step", "harbor_solve"
LOOP_TOOLS = {
    BEGIN: "Begins the task, and returns its instruction.",
    END_STEP: "Runs the tests of a step, and returns the next instruction, or the rewards.",
    SOLVE: "Plays the task's own solution of a step.",
}
INFO = "harbor"
"""The key of a rollout's infos with `rewards`, `problem`, and the `output` of the last tests."""
LOOP = Context(audience="loop")
UNSCORED = ("no reward", "invalid reward", "stopped")
"""Problems of a grade for which Harbor has no reward. Others, such as artifacts that are too large, are worth 0."""
SETUP_S, SOLVE_S, LEAST_S = 120.0, 600.0, 5.0
"""`LEAST_S`: what a call has, however little of the task's time is left, so that its end can be told."""
NO_MORE_TIME = "The time for it is over: end your turn."


class HarborToolset:
    """The tasks of a folder."""

    def __init__(self, settings: HarborSettings) -> None:
        self.settings = settings
        own = [ToolSpec(name, text, {"type": "object"}, "loop", owner="harbor") for name, text in LOOP_TOOLS.items()]
        tools = [tool_spec(name, "harbor", settings.sandbox.hosts, "of the task") for name in settings.tools]
        self.specs: Sequence[ToolSpec] = (*tools, *own)
        self._services = Services()
        self.provider = choose_provider(settings.sandbox, self._services.reaper)
        self._servers: dict[tuple[str, ...], McpToolset] = {}
        self._locks = defaultdict[tuple[str, ...], anyio.Lock](anyio.Lock)

    async def __aenter__(self) -> Self:
        await self._services.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._services.__aexit__(None, None, None)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        """Raises ConfigError for a task that cannot be played, and Unavailable."""
        boxes = await to_thread.run_sync(lambda: TaskBoxes(self.settings, self.settings.read(task.id)))
        async with AsyncExitStack() as stack:
            session = HarborSession(self, boxes)
            stack.push_async_callback(session.close)
            for name, server in boxes.servers:
                await session.add_server(name, await self._connect(name, server), task, stack)
            yield session

    async def _connect(self, name: str, config: Server) -> McpToolset:
        """An MCP server, which all rollouts share that use it; raises Unavailable."""
        headers = (f"{key}: {value.get_secret_value()}" for key, value in config.headers.items())
        key = (name, str(config.url), str(config.transport), *headers)
        async with self._locks[key]:
            if key not in self._servers:  # It is in once it has been opened: whoever opens it may be cancelled.
                server = McpToolset(name, config, services=self._services)
                await self._tasks.start(self._keep_open, server)
                self._servers[key] = server
        status = self._servers[key].status
        if status.state != "up":
            raise Unavailable(f"the MCP server {name!r:.80} is {status.state}: {status.reason}")
        return self._servers[key]

    async def _keep_open(self, server: McpToolset, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with server:
            task_status.started()
            await anyio.sleep_forever()


class HarborSession:
    """One rollout of a task, for a policy that calls tools, or for an agent in its box."""

    agent_folder = AGENT_LOGS

    def __init__(self, toolset: HarborToolset, boxes: TaskBoxes) -> None:
        self.toolset, self.boxes, self.task = toolset, boxes, boxes.task
        self.tools = SandboxToolset(toolset.settings.tools, boxes.policy_boxes[0], toolset.provider, "harbor")
        self.tools.grader = self._make_grader(0)  # Its boxes keep their files.
        self._box = SandboxSession(self.tools, "")
        self._sandbox: Sandbox | None = None
        self._preparing = anyio.Lock()
        self.own_specs: list[ToolSpec] = [*self.tools.specs]
        """The tools of this task alone."""
        self._servers: dict[str, Session] = {}
        self._number, self.left_s = 0, inf
        """The step, and what is left of the time for the policy's calls in it."""
        self._rewards: list[Mapping[str, float]] = []
        self._planted = 0.0

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.toolset.specs

    @property
    def _step(self) -> StepTable | None:
        return self.task.steps[self._number]

    def _make_grader(self, number: int) -> Grader:
        boxes = self.boxes
        return Grader(boxes.grades[number], boxes.policy_boxes[0], self.toolset.provider, boxes.test_boxes[number])

    async def begin(self) -> str:
        """The instruction, for an agent. Raises Unavailable."""
        return str((await call_task(self, BEGIN))["instruction"])

    async def end(self, *, is_last: bool) -> tuple[Mapping[str, float], Mapping[str, Any], str | None]:
        """Rewards, infos and the next instruction after an agent's step. Raises Unavailable."""
        answer = await call_task(self, END_STEP, is_last=is_last)
        return {}, {} if "instruction" in answer else {INFO: answer}, answer.get("instruction")

    async def add_server(self, name: str, server: McpToolset, task: Task, stack: AsyncExitStack) -> None:
        """Offers a server's tools, with its name before them if one is taken."""
        taken = {spec.name for spec in (*self.own_specs, *self.specs)}
        limited = LimitedToolset(server, Limits(timeout_s=self.toolset.settings.timeout_s))
        offered = add_prefix(limited, f"{name}_") if taken & {spec.name for spec in server.specs} else limited
        session = await stack.enter_async_context(offered.open(task))
        for spec in offered.specs:
            try:
                checker_for(spec.parameters)
            except SchemaError:  # The server's mistake: the tool is not offered.
                continue
            self.own_specs.append(spec)
            self._servers[spec.name] = session

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        try:
            if call.name == BEGIN:
                return ToolResult(structured=await self._begin_step())
            if call.name == END_STEP:
                return ToolResult(structured=await self._end_step(is_last=call.arguments != "{}"))
            if call.name == SOLVE:
                return ToolResult(structured=await self._solve())
            return await self._call_tool(call, context)
        except (GatewayError, NoGrade, SandboxEnded, SandboxKilled, OSError) as error:
            reason = f"task {self.task.name}: {error}"
            return ToolResult((Text("The task is not available."),), Outcome.UNAVAILABLE, reason=reason)

    async def finish(self) -> Mapping[str, float]:
        """How often the policy had planted a reward; each step is graded as it ends."""
        return {f"{GRADE}{PLANTED}": self._planted}

    async def close(self) -> None:
        """Ends the box."""
        await self._box.close()

    async def _call_tool(self, call: ToolCall, context: Context) -> ToolResult:
        """A call of the policy's, within the time that the task gives it: engines and graders do not count."""
        if self.left_s <= 0:
            is_last = self._number + 1 == len(self.task.steps)
            return ToolResult((Text(NO_MORE_TIME),), Outcome.ERROR, done=is_last, reason="the task's time is over")
        if call.name not in self._servers:
            await self.get_box()
        started, limit_s = monotonic(), self.toolset.settings.timeout_s
        if call.name not in self._servers:  # What runs in the box is told that its time is over.
            limit_s = min(limit_s, max(LEAST_S, self.left_s))
        with anyio.move_on_after(limit_s):
            result = await self._servers.get(call.name, self._box).call(call, context)
            self.left_s -= monotonic() - started
            return result
        return ToolResult((Text("The tool did not answer in time."),), Outcome.TIMEOUT, reason="no answer in time")

    async def get_box(self) -> Sandbox:
        """The rollout's box. A new one gets the task's files."""
        async with self._preparing:  # No call runs in a box before what its user may not read is gone.
            box = await self._box.get_sandbox()
            if box is not self._sandbox:
                user = self.boxes.users[self._number]
                with suppress(NoGrade):
                    await _run(box, f"{user.become}mkdir -p {AGENT_LOGS} {LOGS} {ARTIFACTS}", SETUP_S)
                if user.closed:
                    await place_files(box, {}, LOGS, user.closed)
                if not self._box.has_left and self.boxes.upload is not None:
                    await place_files(box, {self.boxes.workdir: self.boxes.upload}, LOGS)
                self._sandbox = box
            return box

    async def _run(self, command: str, timeout_s: float) -> Completed:
        """Runs a command in the box; raises NoGrade where there is no shell."""
        return await _run(await self.get_box(), command, timeout_s)

    async def _begin_step(self) -> dict[str, Any]:
        """Prepares a step's box; returns what the policy is asked. Raises NoGrade where something is in the way, which
        the policy may have left in the step before."""
        step = self._step
        self.left_s = self.task.agent_time_of(step) or inf
        self.tools.settings = self.boxes.policy_boxes[self._number]
        if self.boxes.upload is not None:
            await self.get_box()
        folder = self.task.folders_of(step)[0] / "workdir"
        if step is not None and folder.is_dir():
            await place_files(await self.get_box(), {self.boxes.workdir: folder}, LOGS)
            if (folder / "setup.sh").is_file():
                done = await self._run(f"sh {shlex.quote(f'{self.boxes.workdir}/setup.sh')}", SETUP_S)
                problem = f"steps/{step.name}/workdir/setup.sh failed: {_describe(done)}"
                if done.stopped == TOO_LONG:
                    raise Unavailable(problem)
                if done.status != 0:
                    raise NoGrade(problem)
        return {"instruction": self.boxes.instructions[self._number], "steps": len(self.task.steps) - self._number}

    async def _end_step(self, *, is_last: bool) -> dict[str, Any]:
        """Grades a step; `is_last`: the policy was stopped, and does not reach the next."""
        step = self._step
        if self.task.is_separate(step) and self._sandbox is not None:
            for collect in (one for part in self.task.parts_of(step) for one in part.verifier.collect):
                with suppress(NoGrade, SandboxEnded):  # It leaves nothing to collect.
                    if not self._sandbox.alive:
                        await self._box.keep_files()
                    await self._run(collect.command, min(collect.timeout_sec, MOST_S))
        grade = await self._box.grade(self._make_grader(self._number))
        self._planted += grade.is_planted
        rewards = dict(grade.rewards) or {"reward": grade.reward}
        self._rewards.append(rewards)
        if grade.problem.partition(":")[0] in UNSCORED:
            return {"rewards": {}, "problem": grade.problem, "output": grade.output}
        least = step.min_reward if step is not None and step.min_reward is not None else {}
        wanted = least if isinstance(least, Mapping) else {"reward": least}
        if any(rewards.get(name, -inf) < value for name, value in wanted.items()):
            return self._make_end(grade, unreached=0)
        if is_last or self._number + 1 == len(self.task.steps):
            return self._make_end(grade, unreached=len(self.task.steps) - len(self._rewards))
        self._number += 1
        try:
            return await self._begin_step()
        except NoGrade as error:
            end = self._make_end(grade, unreached=len(self.task.steps) - len(self._rewards))
            return {**end, "problem": str(error)}

    def _make_end(self, grade: Grade, unreached: int) -> dict[str, Any]:
        """The rewards of the task. Steps that the policy was stopped before are worth 0."""
        steps = [*self._rewards, *[{"reward": 0.0}] * unreached]
        rewards = steps[-1]
        if self.task.table.multi_step_reward_strategy == "mean":
            names = sorted({name for step in steps for name in step})
            rewards = {name: fsum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
        return {"rewards": rewards, "problem": grade.problem, "output": grade.output}

    async def _solve(self) -> dict[str, Any]:
        """Plays the solution of a step."""
        folders = [folder / "solution" for folder in self.task.folders_of(self._step)]
        folder = next((folder for folder in folders if (folder / "solve.sh").is_file()), None)
        if folder is None:
            raise Unavailable("it has no solution/solve.sh")
        await place_files(await self.get_box(), {"/solution": folder}, LOGS)
        env = {"DEBIAN_FRONTEND": "noninteractive", **self.boxes.resolve("solution.env", self.task.table.solution.env)}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        command = f"{exports}chmod +x /solution/solve.sh\n/solution/solve.sh"
        return {"output": _describe(await self._run(command, min(self.left_s, SOLVE_S)))}


async def call_task(session: AnySession | Session, name: str, *, is_last: bool = False) -> dict[str, Any]:
    """What a tool of the training loop answers. Raises Unavailable."""
    result = await session.call(ToolCall(name, name, '{"is_last": true}' if is_last else "{}"), LOOP)
    if result.outcome is not Outcome.OK:
        raise Unavailable(result.reason or result.text)
    answer: dict[str, Any] = result.structured
    return answer


async def _run(box: Sandbox, command: str, timeout_s: float) -> Completed:
    try:
        return await box.run(("/bin/sh", "-c", command), b"", timeout_s)
    except OSError as error:
        raise NoGrade(f"its root has no shell: {error}") from error


def _describe(done: Completed) -> str:
    status = f"stopped: {done.stopped}" if done.stopped else f"exit status {done.status}"
    return f"{status} {(done.stdout + done.stderr).strip()[-500:]}"
