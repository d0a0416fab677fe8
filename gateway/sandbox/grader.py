"""Grades what a rollout left in its sandbox, in a sandbox in which no process of the policy runs.

What the policy did is graded, be it 0; a sandbox that fails is tried once more, and then `Unavailable`, never 0.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from gateway.errors import Unavailable
from gateway.sandbox import grade_files
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.grade_settings import GradeSettings
from gateway.sandbox.provider import Completed, FrozenFiles, Sandbox, SandboxProvider, opened
from gateway.sandbox.sandbox_settings import SandboxSettings

log = logging.getLogger(__name__)

FILES_S, TRIES, RETRY_WAIT_S = 60.0, 2, 1.0
REWARD_BYTES, OUTPUT_BYTES = 65536, 4000
MAX_FILES_BYTES, HEADER_BYTES = 256 * 2**20, 8192
ARTIFACTS, FILES = "/dev/shm/.artifacts.tar", "/dev/shm/.files.tar"  # noqa: S108 - nothing of an earlier box is there
SCRIPT = Path(grade_files.__file__).read_text(encoding="utf-8")
ENDED, MISSING = "ended", "No such file or directory"


@dataclass(frozen=True, slots=True)
class Grade:
    """What a rollout's sandbox was worth."""

    reward: float
    rewards: Mapping[str, float]
    """All numbers that were written, by name."""
    problem: str = ""
    """Why there was no reward to read, which is the policy's doing: the grade is 0 then."""
    is_planted: bool = False
    """Whether the policy had written a reward itself, which was removed."""
    output: str = ""
    """The end of what the command printed."""


class NoGrade(Exception):
    """What the policy left cannot be graded, so that its grade is 0."""


class Grader:
    """Grades the sandboxes of one entry."""

    def __init__(
        self,
        grade: GradeSettings,
        settings: SandboxSettings,
        provider: SandboxProvider,
        own: SandboxSettings | None = None,
    ) -> None:
        """`settings` are those of the policy's sandbox; the grader's has its `own`, if they are others."""
        self.grade_settings, self._provider = grade, provider
        own = settings if own is None else own
        room = {"disk_mb": settings.disk_mb + 4 * grade.artifact_mb, "files": settings.files + grade.artifact_files}
        """Besides what the policy may have, so that a disk that it filled is none that fails the command."""
        self._grading = own.model_copy(update={**room, "env": {**own.env, **grade.env}})
        self._collecting = settings.model_copy(update={**room, "network": "none"})

    @property
    def limit_s(self) -> float:
        """How long a grade may take: the command, and moving files, with a second try."""
        return TRIES * (self.grade_settings.timeout_s + 4 * FILES_S + RETRY_WAIT_S)

    async def grade(self, left: FrozenFiles | None) -> Grade:
        """The grade of what was left; of an untouched sandbox if none was started. Raises Unavailable."""
        for is_last in (*[False] * (TRIES - 1), True):
            try:
                grade = await self._grade(left)
                if is_last or not grade.problem.startswith(ENDED):  # A kill from outside looks like one from inside.
                    break
            except (SandboxKilled, Unavailable) as error:
                log.warning("a grade failed: %s", error)
                if is_last:
                    statistics.STATISTICS.grades["unavailable"] += 1
                    raise Unavailable(f"the sandbox cannot be graded: {error}") from error
            await anyio.sleep(RETRY_WAIT_S)
        statistics.STATISTICS.grades[grade.problem.partition(":")[0] or "graded"] += 1
        if grade.is_planted:
            statistics.STATISTICS.grades["planted"] += 1
            log.warning("a policy wrote a reward file in its own sandbox, which was removed")
        return grade

    async def _grade(self, left: FrozenFiles | None) -> Grade:
        is_same, is_planted, artifacts = self.grade_settings.mode == "same", False, None
        try:
            if left is not None and not is_same:
                artifacts, is_planted = await self._collect(left)
            async with opened(self._provider, self._grading, left if is_same else None) as box:
                placed = await self._place(box, artifacts)
                is_planted = is_planted or placed["planted"] > 0
                done = await self._run(box)
                if done.stopped:
                    raise NoGrade(f"stopped: {done.stopped}")
                output = (done.stdout + done.stderr)[-OUTPUT_BYTES:]
                rewards = await self._read(box)
        except (NoGrade, SandboxEnded) as error:
            problem = str(error) if isinstance(error, NoGrade) else f"{ENDED}: {error}"
            return Grade(0.0, {}, problem, is_planted)
        reward = rewards.get("reward", sum(rewards.values()) / max(1, len(rewards)))
        return Grade(reward, rewards, "" if rewards else "no reward", is_planted, output)

    async def _collect(self, left: FrozenFiles) -> tuple[bytes, bool]:
        """The artifacts as an archive, and whether there was a reward."""
        settings = self.grade_settings
        given = {
            "collect": settings.artifacts, "archive": ARTIFACTS, "reward": settings.reward,
            "max_bytes": settings.artifact_mb * 2**20, "max_files": settings.artifact_files,
        }  # fmt: skip
        async with opened(self._provider, self._collecting, left) as box:
            done = await _run_script(box, given)
            try:
                packed = await box.get(ARTIFACTS, settings.artifact_mb * 2**20 + HEADER_BYTES * settings.artifact_files)
            except (OSError, SandboxEnded) as error:
                raise Unavailable(f"the artifacts cannot be read: {error}") from error
        return packed, done["planted"] > 0

    async def _place(self, box: Sandbox, packed: bytes | None) -> dict[str, Any]:
        """Puts the artifacts in, and then, over all that is there, what the command needs."""
        settings = self.grade_settings
        artifacts = () if packed is None else settings.artifacts
        try:
            if packed is not None:
                await box.put(ARTIFACTS, packed)
        except (OSError, SandboxEnded) as error:
            raise Unavailable(f"the artifacts cannot be put in: {error}") from error
        unpack = () if packed is None else [(ARTIFACTS, artifacts)]
        try:
            return await place_files(box, settings.files, settings.reward, (*artifacts, *settings.files), unpack)
        except NoGrade as error:
            if settings.mode == "same":
                raise
            raise Unavailable(f"the files of the grade cannot be put in: {error}") from error  # It has no others.

    async def _run(self, box: Sandbox) -> Completed:
        """Runs the command. One that is not there was never in a fresh sandbox, or was removed from the same one."""
        try:
            return await box.run(self.grade_settings.command, b"", self.grade_settings.timeout_s)
        except OSError as error:
            if self.grade_settings.mode == "fresh":
                raise Unavailable(f"the command of the grade cannot be started: {error}") from error
            raise NoGrade(f"not started: {error}") from error

    async def _read(self, box: Sandbox) -> Mapping[str, float]:
        """The numbers of the first reward file that there is. Raises NoGrade for one that cannot be read."""
        for name in grade_files.REWARDS:
            try:
                text = (await box.get(f"{self.grade_settings.reward}/{name}", REWARD_BYTES)).decode()
            except OSError as error:
                if MISSING in str(error):
                    continue
                raise NoGrade(f"invalid reward: {name}: {error}") from error
            except UnicodeDecodeError as error:
                raise NoGrade(f"invalid reward: {name} is no text") from error
            return parse_reward(name, text)
        return {}


async def place_files(
    box: Sandbox,
    files: Mapping[str, Path],
    emptied: str,
    remove: Sequence[str] = (),
    unpack: Sequence[tuple[str, Sequence[str]]] = (),
) -> dict[str, Any]:
    """Puts files and folders of this machine into a box, over what is there; raises Unavailable, or NoGrade where what
    is there keeps them out."""
    packed = await to_thread.run_sync(pack_folders, files)
    try:
        await box.put(FILES, packed)
    except (OSError, SandboxEnded) as error:
        raise Unavailable(f"files cannot be put into a sandbox: {error}") from error
    given = {"reward": emptied, "remove": [*remove], "unpack": [*unpack, (FILES, None)]}
    return await _run_script(box, given)


async def _run_script(box: Sandbox, given: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the script in a box; raises NoGrade where what is there keeps it from its work."""
    try:
        done = await box.run((*box.python, "-I", "-S", "-c", SCRIPT, json.dumps(given)), b"", FILES_S)
    except SandboxEnded as error:  # Nothing of the policy's runs in it.
        raise Unavailable(f"files of a sandbox could not be moved: {error}") from error
    if done.stopped:  # It reads and writes no more than its limits: the machine is too slow.
        raise Unavailable(f"files of a sandbox could not be moved: {done.stopped}")
    if done.status == grade_files.TOO_MUCH:
        raise NoGrade("too large: the artifacts have more than `artifact_mb` or `artifact_files`")
    if done.status == grade_files.FAILED:
        raise NoGrade(f"in the way: {done.stderr[:300]}")
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        reply = None
    if done.status or not isinstance(reply, dict):
        raise Unavailable(f"files of a sandbox could not be moved: {done.stderr[-300:]}")
    return reply


def parse_reward(name: str, text: str) -> Mapping[str, float]:
    """The numbers of a reward file; raises NoGrade for one that has none, or anything else."""
    try:
        value = json.loads(text) if name.endswith(".json") else float(text)
    except (ValueError, RecursionError) as error:
        raise NoGrade(f"invalid reward: {name} cannot be read") from error
    numbers = value if isinstance(value, dict) else {"reward": value}
    for key, number in numbers.items():
        if not isinstance(number, int | float) or not math.isfinite(_as_float(number)):
            raise NoGrade(f"invalid reward: {name}: {key[:100]!r} is no finite number")
    return {key: float(number) for key, number in numbers.items()}


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # An integer of many digits.
        return math.inf


def pack_folders(files: Mapping[str, Path]) -> bytes:
    """Files and folders of this machine as an archive, at their places inside; raises Unavailable."""
    packed = io.BytesIO()

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if packed.tell() + member.size > MAX_FILES_BYTES:
            raise Unavailable(f"the files of the grade have more than {MAX_FILES_BYTES >> 20} MB: {member.name}")
        return None if member.isdev() else member

    try:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for place, path in files.items():
                tar.add(os.path.realpath(path), place.lstrip("/"), filter=keep)
    except OSError as error:
        raise Unavailable(f"the files of the grade cannot be read: {error}") from error
    return packed.getvalue()
