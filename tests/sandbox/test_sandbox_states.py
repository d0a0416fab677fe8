"""Sandboxes that begin from a prepared state, and the hash of what the tools leave there."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.sandbox import sandbox_toolset
from gateway.sandbox.bubblewrap import find_copy_reason
from gateway.sandbox.sandbox_state import unpack
from gateway.state.state_hash import hash_state
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.sandbox.roots import make_layer, make_link


def make_gateway(folder: Path, **settings: Any) -> Gateway:
    file = folder / "box.yaml"
    file.write_text(json.dumps({"tools": [{"sandbox_tools": ["shell"], "timeout_s": 60, **settings}]}))
    return Gateway.load(file, None)


async def play(gateway: Gateway, task: Task, *commands: str) -> tuple[str, dict[str, str]]:
    text = ""
    async with gateway.open(task) as session:
        for command in commands:
            result = await session.call(ToolCall("1", "shell", json.dumps({"command": command})))
            assert result.outcome is Outcome.OK, result
            text = result.text
        await session.finish()
        return text, session.states


@pytest.fixture
def states(tmp_path: Path) -> Path:
    folder = tmp_path / "states" / "one"
    (folder / "docs").mkdir(parents=True)
    (folder / "docs" / "a.txt").write_text("first\n")
    for kind in ("zip", "gztar"):
        shutil.make_archive(str(tmp_path / "states" / kind), kind, folder)
    return tmp_path / "states"


async def test_sandboxes_begin_from_states_and_end_with_the_hash_of_what_is_left(tmp_path: Path, states: Path) -> None:
    before = hash_state(states)
    with anyio.fail_after(100):
        async with make_gateway(tmp_path, state="states/one", states="states") as gateway:
            edit = "echo more >> docs/a.txt; cat docs/a.txt; ln -s /etc/passwd link"
            played = [
                await play(gateway, Task(state=name, hash_state=True), edit) for name in ("", "one", "zip", "gztar")
            ]
            _, untouched = await play(gateway, Task(hash_state=True))
            _, read = await play(gateway, Task(hash_state=True), "cat docs/a.txt")
    assert [text for text, _ in played] == ["first\nmore"] * 4
    ends = [states["sandbox"] for _, states in played]
    assert len(set(ends)) == 1 and ends[0] != untouched["sandbox"]
    assert untouched == read == {"sandbox": hash_state(states / "one")}
    assert hash_state(states) == before


STATEFUL = """
from pathlib import Path

def appends(text: str) -> str:
    file = Path("/rollout/docs/a.txt")
    file.write_text(file.read_text().strip() + text)
    return file.read_text()
"""


async def test_native_tools_begin_from_the_state_of_the_task_and_each_entry_has_a_hash(
    tmp_path: Path, states: Path
) -> None:
    (tmp_path / "stateful.py").write_text(STATEFUL)
    boxes = [
        {"sandbox_tools": [tool], "prefix": far} for tool, far in (("shell", "far_"), ("shell", ""), ("python", ""))
    ]
    native = {"function": "stateful:appends", "isolation": "sandbox", "state": "states/one"}
    entries = [{"states": "states", **entry} for entry in (*boxes, native)]
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": entries}))
    ends = []
    async with Gateway.load(tmp_path / "tools.yaml", None) as gateway:
        for state, repeats in (("", 2), ("zip", 2), ("", 0)):
            async with gateway.open(Task(state=state, hash_state=True)) as session:
                call = ToolCall("1", "appends", '{"text": "+"}')
                texts = [(await session.call(call)).text for _ in range(repeats)]
                await session.finish()
            ends.append(session.states["appends"])
            assert texts == ["first+", "first++"][:repeats]
            assert session.states.keys() == {"appends", "sandbox", "sandbox_2", "far_sandbox"}
        with pytest.raises(SessionError, match="three"):
            await gateway.begin(Task(state="three"))
    assert ends[2] == hash_state(states / "one") != ends[0] == ends[1]
    (states / "one" / "docs" / "a.txt").write_text("first++")
    assert ends[0] == hash_state(states / "one")


async def test_state_that_cannot_be_put_in_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "file").write_bytes(bytes(3 * 2**20))
    state = shutil.make_archive(str(tmp_path / "large"), "tar", tmp_path / "large")  # It is unpacked, not overlaid.
    with anyio.fail_after(100):
        async with make_gateway(tmp_path, state=state, sandbox={"disk_mb": 1}) as gateway, gateway.open() as session:
            for _ in range(2):
                result = await session.call(ToolCall("1", "shell", '{"command": "ls"}'))
                assert result.outcome is Outcome.UNAVAILABLE and "state" in str(result.reason), result


@pytest.mark.parametrize("kind", ["folder", "folder of two owners", "archive", "folder that is sent"])
async def test_siblings_begin_alike_and_do_not_see_each_others_changes(
    kind: str, tmp_path: Path, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = states / "zip.zip" if kind == "archive" else states / "one"
    if kind == "folder of two owners":
        (state / "docs" / "other.txt").write_text("other")
        if os.geteuid() == 0:
            os.chown(state / "docs" / "other.txt", 65_533, 65_533)
            assert "another owner" in find_copy_reason(state)
    if kind == "folder that is sent":  # Where nobody but bubblewrap may make namespaces.
        monkeypatch.setattr(sandbox_toolset, "can_mount_states", lambda: False)
    before = hash_state(states)
    edit = "cat docs/a.txt; echo mine > docs/a.txt; rm -f docs/other.txt; mkdir new; chmod +x docs/a.txt; ls"
    async with make_gateway(tmp_path, state=str(state)) as gateway, gateway.open() as first, gateway.open() as second:
        texts = [
            (await session.call(ToolCall("1", "shell", json.dumps({"command": command})))).text
            for session, command in ((first, edit), (second, edit), (first, "cat docs/a.txt"))
        ]
    assert texts == ["first\ndocs\nnew", "first\ndocs\nnew", "mine"]
    assert hash_state(states) == before


async def test_large_state_starts_without_being_copied_where_it_can_be_overlaid(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    for number in range(2000):
        (tmp_path / "large" / f"{number}.txt").write_bytes(b"x" * 1024)
    limits = {"disk_mb": 1, "files": 100}  # Of what it adds: a copy would not fit.
    async with make_gateway(tmp_path, state="large", sandbox=limits) as gateway, gateway.open() as session:

        async def shell(command: str) -> ToolResult:
            return await session.call(ToolCall("1", "shell", json.dumps({"command": command})))

        listed = await shell("ls | wc -l")
        if find_copy_reason(tmp_path / "large"):
            assert listed.outcome is Outcome.UNAVAILABLE
            return
        assert listed.text == "2000", listed
        assert "No space left" in (await shell("for n in $(seq 300); do echo > new$n; done")).text
        assert (
            "No space left" in (await shell("rm new*; for n in 1 2 3; do head -c 600K /dev/zero > much$n; done")).text
        )


async def test_state_leads_nowhere_outside_and_cannot_be_written_through(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "real").mkdir()
    for name, target in (("up", "../secret"), ("away", str(tmp_path / "secret")), ("folder", str(tmp_path))):
        (tmp_path / "real" / name).symlink_to(target)
    (tmp_path / "real" / "own").write_text("prepared")
    (tmp_path / "state").symlink_to("real")
    async with make_gateway(tmp_path, state="state") as gateway:
        reads = "cat up away folder/secret; echo stolen > away; echo stolen > folder/secret; ls /mnt /media /srv"
        text, _ = await play(gateway, Task(), f"({reads}) 2>&1; echo mine > own; cat own")
        tricks = "ln own hard; mv own moved; echo stolen > hard; cat moved; ls -A /rollout/../mnt"
        linked, _ = await play(gateway, Task(), f"({tricks}) 2>&1 || true")
    assert "kept" not in text and text.endswith("mine") and linked.startswith("stolen"), (text, linked)
    assert (tmp_path / "secret").read_text() == "kept"
    assert (tmp_path / "real" / "own").read_text() == "prepared"


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_forged_archives_do_not_lead_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="leads out"):
        unpack(make_layer([(name, b"")]), tmp_path / "in")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_nothing_is_written_through_links_of_forged_archives(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("kept")
    links = make_link("file", str(tmp_path / "secret"), kind), make_link("folder", str(tmp_path), kind)
    packed = make_layer([*links, ("file", b"stolen"), ("folder/secret", b"stolen")])
    with pytest.raises((ValueError, OSError)):
        unpack(packed, tmp_path / "in")
    assert (tmp_path / "secret").read_text() == "kept" and (tmp_path / "secret").stat().st_nlink == 1


@pytest.mark.parametrize("size", [6, 10**13])
def test_forged_archives_neither_wait_for_pipes_nor_fill_the_memory(tmp_path: Path, size: int) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        pipe, member = tarfile.TarInfo("file"), tarfile.TarInfo("file" if size == 6 else "other")
        pipe.type, member.size = tarfile.FIFOTYPE, size
        tar.addfile(pipe)
        tar.fileobj.write(member.tobuf(tarfile.GNU_FORMAT) + b"stolen".ljust(tarfile.BLOCKSIZE, b"\0"))  # type: ignore[union-attr]
    (tmp_path / "in").mkdir()
    with pytest.raises((ValueError, OSError)):
        unpack(packed.getvalue(), tmp_path / "in")


async def test_links_pipes_and_programs_have_one_hash_wherever_they_are(tmp_path: Path) -> None:
    state = tmp_path / "states" / "one"
    (state / "docs").mkdir(parents=True)
    (state / "docs" / "a.txt").write_text("first\n")
    (state / "program").write_text("#!/bin/sh\n")
    (state / "program").chmod(0o755)
    for name, target in (("to_file", "docs/a.txt"), ("to_folder", "docs"), ("away", "/etc/passwd"), ("dangling", "no")):
        (state / name).symlink_to(target)
    async with make_gateway(tmp_path, state="states/one") as gateway:
        _, untouched = await play(gateway, Task(hash_state=True))
        _, read = await play(gateway, Task(hash_state=True), "cat to_file to_folder/a.txt")
        change = "ln -s docs new; ln docs/a.txt same; mkfifo pipe; rm dangling"
        _, changed = await play(gateway, Task(hash_state=True), change)
    assert untouched == read == {"sandbox": hash_state(state)}
    (state / "new").symlink_to("docs")
    (state / "same").write_text("first\n")
    os.mkfifo(state / "pipe")
    (state / "dangling").unlink()
    assert changed == {"sandbox": hash_state(state)}
