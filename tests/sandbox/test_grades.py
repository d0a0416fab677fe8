"""Grades: what a rollout left is graded where nothing was planted, and a sandbox that fails is never a zero."""

from __future__ import annotations

import io
import json
import site
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.build import build_plan
from gateway.client import RemoteGateway
from gateway.errors import ConfigError, Unavailable
from gateway.gateway import Gateway
from gateway.process.reaper import Reaper
from gateway.sandbox import grade_files, grader
from gateway.sandbox.confined_process import SandboxEnded, SandboxKilled
from gateway.sandbox.grade_settings import GradeSettings
from gateway.sandbox.grader import FILES_S, TRIES, Grade, Grader, NoGrade, parse_reward
from gateway.sandbox.provider import BubblewrapProvider, Completed, FrozenFiles, LocalSandbox
from gateway.sandbox.root_interpreter import LOADED_PYTHON
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_statistics import STATISTICS
from gateway.state.state_hash import hash_state
from gateway.types import Outcome, Task, ToolCall
from tests.live_server import live_server
from tests.sandbox.cheats import CHEATS, Cheat
from tests.sandbox.roots import make_layer, make_link, make_root
from tests.waiting import wait_until
from trainer.ledger import Ledger
from trainer.rollout.loop import sum_rewards
from trainer.rollout.rollout import Rollout, StopReason
from trainer.train.collect import StepRollouts

LIMITS = {"memory_mb": 256, "processes": 40, "disk_mb": 16, "files": 1000}
EXPECTED = "4711"
SHELL_TESTS = """
[ -f /root/.profile ] && . /root/.profile
if matches "$(cat /tests/expected)" /app/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
PYTHON_TESTS = f"""
cd /app
mkdir -p /app/tests
cp /tests/test_answer.py /app/tests
if {" ".join(LOADED_PYTHON)} -m pytest -q -p no:cacheprovider /app/tests >&2
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
TEST_ANSWER = """
import json
def test_answer():
    assert json.load(open("/app/answer")) == json.load(open("/tests/expected"))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_root(tmp_path_factory.mktemp("roots"), patch)


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "expected").write_text(f"{EXPECTED}\n")
    (folder / "test.sh").write_text(SHELL_TESTS)
    (folder / "python.sh").write_text(PYTHON_TESTS)
    (folder / "test_answer.py").write_text(TEST_ANSWER)
    return folder


def make_settings(root: str) -> SandboxSettings:
    packages = site.getsitepackages()[0]
    env = {"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return SandboxSettings.model_validate({**LIMITS, "root": root, "readable": [packages], "env": env})


def make_grade(tests: Path, **settings: Any) -> GradeSettings:
    given = {"command": ["sh", "/tests/test.sh"], "files": {"/tests": tests}, "timeout_s": 60.0, **settings}
    if given.get("mode") != "same":
        given = {"artifacts": ["/app/answer", "/app/src"], "artifact_mb": 8, "artifact_files": 500, **given}
    return GradeSettings.model_validate(given)


async def play(provider: BubblewrapProvider, settings: SandboxSettings, grade: GradeSettings, commands: str) -> Grade:
    """The grade of a policy that ran commands."""
    box = await provider.start(settings, keeps_files=True)
    with suppress(SandboxEnded):
        await box.run(("sh", "-c", f"echo 1 > /app/answer; {commands}"), b"", 30.0)
    left = await box.freeze()
    try:
        return await Grader(grade, settings, provider).grade(left)
    finally:
        await left.close()


@pytest.mark.parametrize("mode", ["fresh", "same"])
@pytest.mark.parametrize("kind", ["test.sh", "python.sh"])
async def test_right_answer_is_graded_one_and_a_wrong_one_zero(
    mode: str, kind: str, root: str, tests: Path, provider: BubblewrapProvider
) -> None:
    grade, settings = make_grade(tests, mode=mode, command=["sh", f"/tests/{kind}"]), make_settings(root)
    right = await play(provider, settings, grade, f"echo {EXPECTED} > /app/answer")
    assert (right.reward, right.problem) == (1.0, ""), right
    wrong = await play(provider, settings, grade, "echo 4712 > /app/answer")
    assert (wrong.reward, wrong.problem, wrong.is_planted) == (0.0, "", False), wrong


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
async def test_no_cheat_scores_in_a_fresh_box_and_those_of_the_same_box_are_known(
    cheat: Cheat, root: str, tests: Path, provider: BubblewrapProvider
) -> None:
    command = ["sh", "/tests/test.sh" if cheat.tests == "shell" else "/tests/python.sh"]
    settings, fresh_grade = make_settings(root), make_grade(tests, command=command, artifacts=cheat.artifacts)
    with anyio.fail_after(300):
        fresh = await play(provider, settings, fresh_grade, cheat.commands)
        same = await play(
            provider, settings, make_grade(tests, command=command, mode="same", timeout_s=10.0), cheat.commands
        )
    assert (
        fresh.reward == 0.0 and fresh.problem.startswith(cheat.problem) and bool(fresh.problem) == bool(cheat.problem)
    )
    assert same.reward == cheat.in_same, same
    is_planted = cheat.name in {"reward.txt", "folder of rewards elsewhere", "folder in place of the reward",
                                "writes the reward for ever"}  # fmt: skip
    assert fresh.is_planted >= is_planted and same.is_planted >= is_planted


class FailingProvider(BubblewrapProvider):
    """Starts sandboxes of which some fail, as machines do."""

    def __init__(self, reaper: Reaper, fails: int, error: Exception) -> None:
        super().__init__(reaper)
        self.fails, self.error = fails, error

    async def start(self, settings: SandboxSettings, state: Path | None = None, **options: Any) -> LocalSandbox:
        if options.get("keeps_files") or not self.fails:
            return await super().start(settings, state, **options)
        self.fails -= 1
        raise self.error


@pytest.mark.parametrize("error", [Unavailable("no memory"), SandboxKilled("it was ended from outside")])
async def test_box_that_fails_is_tried_once_more_and_then_unavailable(
    error: Exception, root: str, tests: Path, provider: BubblewrapProvider
) -> None:
    settings, before = make_settings(root), STATISTICS.grades["unavailable"]
    failing = FailingProvider(provider._reaper, 1, error)
    assert (await play(failing, settings, make_grade(tests), f"echo {EXPECTED} > /app/answer")).reward == 1.0
    failing.fails = 10
    with pytest.raises(Unavailable, match="cannot be graded"):
        await play(failing, settings, make_grade(tests), "")
    assert STATISTICS.grades["unavailable"] == before + 1


@pytest.mark.parametrize("mode", ["fresh", "same"])
async def test_only_what_a_policy_may_have_put_in_the_way_of_a_grade_is_its_zero(
    mode: str, root: str, tests: Path, provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = grader.SCRIPT.replace("def place(", "def place(given):\n    raise OSError('no room')\ndef unused(")
    monkeypatch.setattr(grader, "SCRIPT", script)
    if mode == "same":
        assert (await play(provider, make_settings(root), make_grade(tests, mode=mode), "")).problem.endswith("no room")
        return
    with pytest.raises(Unavailable, match="no room"):
        await play(provider, make_settings(root), make_grade(tests, mode=mode), "")


async def test_policy_that_closes_folders_on_the_way_of_mounts_is_graded(
    root: str, tests: Path, provider: BubblewrapProvider
) -> None:
    settings = make_settings(root).model_copy(update={"network": ("pypi.org",)})
    closed = "chmod 700 /run; chmod 0 /etc /rollout /"
    for mode in ("fresh", "same"):
        right = await play(provider, settings, make_grade(tests, mode=mode), f"echo {EXPECTED} > /app/answer; {closed}")
        assert (right.reward, right.problem) == (1.0, ""), right


async def test_grader_that_is_not_there_or_whose_command_is_not_is_no_zero(
    root: str, tests: Path, provider: BubblewrapProvider
) -> None:
    settings = make_settings(root)
    for grade in (make_grade(tests, command=["none"]), make_grade(tests / "none")):
        with pytest.raises(Unavailable):
            await play(provider, settings, grade, "")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("reward.txt", " 0.5\n", {"reward": 0.5}),
        ("reward.json", "1", {"reward": 1.0}),
        ("reward.json", '{"a": 1, "b": 0}', {"a": 1.0, "b": 0.0}),
        ("reward.json", "{}", {}),
        ("reward.json", "true", {"reward": 1.0}),
        *[("reward.txt", text, None) for text in ("", "NaN", "inf", "1e999", "one", "1 2")],
        *[("reward.json", text, None) for text in ("", "NaN", '{"a": Infinity}', '"1"', "[1]", "null")],
        *[("reward.json", text, None) for text in ("9" * 400, "[" * 9999)],
    ],
)  # fmt: skip
def test_reward_files_have_finite_numbers_or_are_told(
    name: str, text: str, expected: Mapping[str, float] | None
) -> None:
    if expected is not None:
        assert parse_reward(name, text) == expected
        return
    with pytest.raises(NoGrade, match="invalid reward"):
        parse_reward(name, text)


def write_tools(folder: Path, root: str, **grade: Any) -> Path:
    sandbox = {**LIMITS, **({"root": root} if root else {})}
    entry = {"sandbox_tools": ["shell"], "sandbox": sandbox, "timeout_s": 60, "grade": grade}
    (folder / "box.yaml").write_text(json.dumps({"tools": [entry]}))
    return folder / "box.yaml"


@pytest.fixture
def tools(tmp_path: Path, root: str, tests: Path) -> Path:
    """A file with one entry, which is graded."""
    return write_tools(tmp_path, root, **GIVEN)


@asynccontextmanager
async def open_remote(file: Path) -> AsyncIterator[RemoteGateway]:
    """A client of a gateway over HTTP."""
    with live_server(lambda: Gateway.load(file, None)) as served:
        async with RemoteGateway(served.url) as client:
            yield client


GIVEN = {"command": ["sh", "/tests/test.sh"], "files": {"/tests": "tests"}, "artifacts": ["/app/answer"]}


async def test_session_ends_with_the_grade_of_what_its_calls_left(tools: Path, tmp_path: Path) -> None:
    async with Gateway.load(tools, None) as gateway:
        for answer, reward in ((EXPECTED, 1.0), ("1", 0.0), ("", 0.0)):
            async with gateway.open(Task(hash_state=True)) as session:
                if answer:
                    command = f"echo {answer} > /app/answer; echo kept > file; sleep 1000 &"
                    result = await session.call(ToolCall("1", "shell", json.dumps({"command": command})))
                    assert result.outcome is Outcome.OK, result
                assert await session.finish() == {"grade": reward}
            if answer:
                (tmp_path / "state").mkdir(exist_ok=True)
                (tmp_path / "state/file").write_text("kept\n")
                assert session.states == {"sandbox": hash_state(tmp_path / "state")}


async def test_state_of_a_sandbox_that_is_lost_when_it_is_graded_is_not_the_prepared_one(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(self: LocalSandbox) -> FrozenFiles:
        await self.stop()
        raise SandboxEnded("its files cannot be packed")

    monkeypatch.setattr(LocalSandbox, "freeze", end)
    async with Gateway.load(tools, None) as gateway:
        async with gateway.open(Task(hash_state=True)) as session:
            await session.call(ToolCall("1", "shell", '{"command": "echo 1 > file"}'))
            assert await session.finish() == {"grade": 0.0}
        assert session.states == {"sandbox": "not packed: its files cannot be packed"}


def test_archive_of_artifacts_writes_nothing_elsewhere_whoever_made_it(tmp_path: Path) -> None:
    top, out = tmp_path / "app", tmp_path / "out"
    out.mkdir()
    app = str(top).lstrip("/")
    members = [
        (f"{app}/good", b"1"), (f"{app}/../../out/one", b"2"), (f"{app[:-3]}out/two", b"2"), (f"{app}2/three", b"2"),
        make_link(f"{app}/away", "../out"), make_link(f"{app}/absolute", str(out)), make_link(f"{app}/mine", "good"),
        make_link(f"{app}/self", "."), make_link(f"{app}/behind", "self/../out"), (f"{app}/away/four", b"2"),
    ]  # fmt: skip
    archive = tmp_path / "archive.tar"
    archive.write_bytes(make_layer(members))
    grade_files.place({"reward": str(tmp_path / "reward"), "remove": [], "unpack": [(archive, [str(top)])]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "out", "reward"] and not [*out.iterdir()]
    assert sorted(path.name for path in top.rglob("*")) == ["away", "four", "good", "mine", "self"]
    assert not (top / "away").is_symlink() and (top / "mine").read_text() == "1"


async def test_rollout_whose_last_call_was_late_is_graded_by_its_own_files(tools: Path) -> None:
    async with Gateway.load(tools, None) as gateway, gateway.open() as session:
        command = f"echo {EXPECTED} > /app/answer; kill -STOP $PPID; sleep 600"  # The server of commands.
        with anyio.fail_after(10):
            late = await session.call(ToolCall("1", "shell", json.dumps({"command": command})))
        assert "did not answer in time" in late.text, late
        assert await session.finish() == {"grade": 1.0}


@pytest.mark.parametrize("times", [1, 2])
async def test_grader_whose_box_is_ended_tries_once_more_as_nobody_knows_who_ended_it(
    times: int, root: str, tests: Path, provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, left = LocalSandbox.run, [times]

    async def end(self: LocalSandbox, command: Sequence[str], *words: Any, **options: Any) -> Completed:
        if command[-1] == "/tests/test.sh" and left[0]:
            left[0] -= 1
            raise SandboxEnded("its processes ended it")
        return await run(self, command, *words, **options)

    monkeypatch.setattr(LocalSandbox, "run", end)
    grade = await play(provider, make_settings(root), make_grade(tests), f"echo {EXPECTED} > /app/answer")
    assert (grade.reward, grade.problem) == ((1.0, "") if times == 1 else (0.0, "ended: its processes ended it"))


async def test_stopped_sandbox_has_no_files_to_freeze(root: str, provider: BubblewrapProvider) -> None:
    """Its descriptors are closed by then: their numbers may lead to the files of another rollout."""
    box = await provider.start(make_settings(root), keeps_files=True)
    await box.stop()
    with pytest.raises(SandboxEnded, match="kept no files"):
        await box.freeze()


async def test_grade_without_a_root_is_made_of_the_files_below_rollout(tmp_path: Path) -> None:
    (tmp_path / "check.sh").write_text('[ "$(cat answer)" = 1 ] && echo 0.25 > logs/reward.txt; mkdir logs/more')
    files = {"/rollout/check/check.sh": "check.sh"}
    grade = {"command": ["sh", "check/check.sh"], "files": files, "reward": "/rollout/logs"}
    for extra in ({"mode": "same"}, {"artifacts": ["/rollout/answer"]}):
        file = write_tools(tmp_path, "", **grade, **extra)
        async with Gateway.load(file, None) as gateway, gateway.open() as session:
            await session.call(ToolCall("1", "shell", '{"command": "echo 1 > answer"}'))
            assert await session.finish() == {"grade": 0.25}


async def test_rewards_that_cannot_be_collected_are_no_zero_over_http(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Grader, left: object) -> Grade:
        raise Unavailable("the machine is down")

    async with open_remote(tools) as client:
        async with client.open() as session:
            await session.call(ToolCall("1", "shell", f'{{"command": "echo {EXPECTED} > /app/answer"}}'))
            assert await session.finish() == {"grade": 1.0}
        monkeypatch.setattr(Grader, "grade", fail)
        async with client.open() as session:
            with pytest.raises(Unavailable, match="rewards could not be collected"):
                await session.finish()


class HangingGrader:
    """Grades for ever, once it has begun."""

    def __init__(self) -> None:
        self.began, self.calls, self.ended = anyio.Event(), 0, False

    async def grade(self, left: object) -> Grade:
        self.calls += 1
        self.began.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.ended = True
        raise AssertionError


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> HangingGrader:
    hanging = HangingGrader()
    monkeypatch.setattr(Grader, "grade", hanging.grade)
    return hanging


async def test_sessions_that_nobody_waits_for_are_not_graded(tools: Path, hanging: HangingGrader) -> None:
    with anyio.fail_after(30):
        async with Gateway.load(tools, None) as gateway:
            with pytest.raises(KeyError):
                async with gateway.open():
                    raise KeyError
            expired = await gateway.begin(Task(ttl_s=0.01))
            await wait_until(lambda: expired.id not in gateway.sessions)
            await gateway.begin(Task())  # The gateway stops while it is open.
    assert hanging.calls == 0


async def test_remote_client_that_is_cancelled_is_not_graded_and_a_grade_that_runs_for_it_is_ended(
    tools: Path, hanging: HangingGrader
) -> None:
    with anyio.fail_after(60):
        async with open_remote(tools) as client:
            with anyio.CancelScope() as rollout:
                async with client.open():
                    rollout.cancel()
                    await anyio.sleep_forever()
            assert hanging.calls == 0
            async with anyio.create_task_group() as tasks:

                async def finish() -> None:
                    async with client.open() as session:
                        await session.finish()

                tasks.start_soon(finish)
                await wait_until(lambda: hanging.calls == 1)
                tasks.cancel_scope.cancel()
            assert hanging.ended


async def test_planted_rewards_are_counted_for_the_rollout_and_are_no_reward(tools: Path) -> None:
    infos: dict[str, Any] = {}
    async with open_remote(tools) as client, client.open() as session:
        plant = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
        await session.call(ToolCall("1", "shell", json.dumps({"command": plant})))
        assert await session.finish() == {"grade": 0.0}
        assert sum_rewards(session.rewards, infos) == {"end": 0.0}
        assert infos == {"counts": {"grade/planted": 1.0}}
    played = [Rollout("t", Ledger(), StopReason.DONE, infos=each) for each in (infos, infos, {})]
    assert StepRollouts(finished=played).metrics(0)["grade/planted"] == 2.0
    assert "grade/planted" not in StepRollouts(finished=played[2:]).metrics(0)


def add_entry(tools: Path, **changes: object) -> None:
    """Adds an entry like the first one, but for the changes."""
    (entry,) = json.loads(tools.read_text())["tools"]
    tools.write_text(json.dumps({"tools": [entry, {**entry, **changes}]}))


def test_two_grades_with_one_name_are_refused_by_name(tools: Path) -> None:
    add_entry(tools, sandbox_tools=["files"])
    with pytest.raises(
        ConfigError, match=r"tools\[1\]\.grade(.|\n)*tools\[0\] has a grade with the same name, `grade`"
    ):
        build_plan([tools], None)


async def test_gateway_that_stops_ends_grades_and_says_that_they_are_missing(
    tools: Path, hanging: HangingGrader
) -> None:
    with anyio.fail_after(30):
        async with Gateway.load(tools, None) as gateway, anyio.create_task_group() as tasks:
            session = await gateway.begin(Task())
            tasks.start_soon(session.close)
            await hanging.began.wait()
            await session.close(is_abandoned=True)
    assert not session.has_rewards


async def test_two_graded_entries_have_the_time_of_both_whatever_the_clients_timeout(tools: Path) -> None:
    add_entry(tools, prefix="second_")
    async with open_remote(tools) as client, client.open() as session:
        assert session._finish_s > 2 * TRIES * (GradeSettings(command=("a",)).timeout_s + 4 * FILES_S)
        client.__dict__["_http"].timeout.read = 0.05
        assert await session.finish() == {"grade": 0.0, "second_grade": 0.0}


@pytest.mark.parametrize(
    ("grade", "problem"),
    [
        ({"command": []}, "grade.command"),
        ({"artifacts": ["/tests"]}, "would lie over"),
        ({"artifacts": ["/tests/expected"]}, "would lie over"),
        ({"artifacts": ["/logs"]}, "would lie over"),
        ({"artifacts": ["/"]}, "grade.artifacts"),
        ({"artifacts": ["/app/../tests"]}, "grade.artifacts"),
        ({"artifacts": ["/proc/1"]}, "folder of the kernel"),
        ({"reward": "/dev/x"}, "folder of the kernel"),
        ({"files": {"/.mtrl/tests": "tests"}}, "folder of the kernel"),
        ({"mode": "same"}, "`artifacts` belong to"),
        ({"files": {"/tests": "none"}}, "there is no .*none"),
        ({"files": {"tests": "tests"}}, "grade.files"),
    ],
)
def test_grades_that_cannot_be_made_are_refused_by_name(
    grade: dict[str, Any], problem: str, tmp_path: Path, root: str, tests: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"box\.yaml(.|\n)*{problem}"):
        build_plan([write_tools(tmp_path, root, **{**GIVEN, **grade})], None)


def test_grade_without_a_root_uses_no_place_that_cannot_be_written(tmp_path: Path, tests: Path) -> None:
    with pytest.raises(ConfigError, match="only `/rollout` of this sandbox can be written"):
        build_plan([write_tools(tmp_path, "", **GIVEN)], None)


def test_files_of_a_grade_that_are_too_large_are_told_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(Unavailable, match="more than 256 MB: tests/huge"):
        grader.pack_folders({"/tests": tmp_path})


def test_link_to_itself_is_packed_as_the_link_that_it_is(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with tarfile.open(fileobj=io.BytesIO(grader.pack_folders({"/tests/loop": tmp_path / "loop"}))) as tar:
        assert [(member.name, member.linkname) for member in tar] == [("tests/loop", "loop")]
