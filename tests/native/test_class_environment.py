"""An environment class written for TRL is named as a tool class, unchanged: one object for each open session."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import Outcome, Task, ToolCall

SAFE = '''
import threading

GATE = threading.Event()


class Safe:
    """A safe that opens with the right number."""

    made = 0

    def __init__(self, locks: int = 1) -> None:
        type(self).made += 1
        self.locks = locks

    @property
    def weight(self) -> int:
        raise RuntimeError("properties are no tools")

    def reset(self, code: int = 7, **row) -> str:
        self.code, self.dialled, self.open = code, [], False
        return f"It has {self.locks} lock."

    def dial(self, number: int) -> str:
        """Turns the dial.

        Args:
            number: from 0 to 9

        Returns:
            What is heard.
        """
        self.dialled.append(number)
        return "click" if number == self.code else "nothing"

    async def listen(self) -> list:
        """Puts an ear to the door."""
        return list(self.dialled)

    def kick(self) -> str:
        """Kicks it."""
        raise OSError("a broken toe")

    def lean(self) -> str:
        """Leans on it, for ever."""
        GATE.wait()
        return "moved"

    def get_reward(self) -> float:
        return float(self.code in self.dialled)

    def _hidden(self) -> None: ...


def make_nothing() -> dict:
    return {}


class Wall:
    def reset(self) -> None: ...


class Odd(Wall):
    def look(self, *args: int) -> str: ...
'''
Load = Callable[..., Gateway]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Reads a tools file with one entry, beside the module of a TRL user; methods that wait go on at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "safe.py").write_text(SAFE)

    def load(name: str = "safe.Safe", **entry: Any) -> Gateway:
        (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": name, **entry}]}))
        return Gateway.load(tmp_path / "tools.yaml", None)

    yield load
    if "safe" in sys.modules:
        sys.modules["safe"].GATE.set()


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("1", name, json.dumps(arguments))


async def test_public_methods_are_tools_with_their_hints_and_docstrings(load: Load) -> None:
    async with load(prefix="my_") as gateway:
        specs = {spec.name: spec for spec in gateway.specs}
    assert sorted(specs) == ["my_dial", "my_kick", "my_lean", "my_listen"]
    assert specs["my_dial"].description == "Turns the dial.\n\nReturns: What is heard."
    assert specs["my_dial"].parameters["properties"]["number"] == {"type": "integer", "description": "from 0 to 9"}


async def test_each_session_is_an_episode_with_its_own_state_and_reward(load: Load) -> None:
    async with load(config={"type": "native", "locks": 3}) as gateway, AsyncExitStack() as stack:
        task = Task(create={"dial": {"code": 4}})
        first, second = [await stack.enter_async_context(gateway.open(task)) for _ in range(2)]
        assert (await first.call(call("dial", number=4))).text == "It has 3 lock.\nclick"
        assert (await second.call(call("dial", number=5))).text == "It has 3 lock.\nnothing"
        assert (await first.call(call("listen"))).text == "[4]"
        assert (await first.call(call("dial", number="many"))).outcome is Outcome.INVALID
        kicked = await first.call(call("kick"))
        assert (kicked.outcome, kicked.text) == (Outcome.ERROR, "Error: OSError: a broken toe")
        assert [await first.finish(), await second.finish()] == [{"Safe": 1.0}, {"Safe": 0.0}]


async def test_object_is_reset_and_used_again_as_in_trl(load: Load) -> None:
    async with load() as gateway:
        for _ in range(3):
            async with gateway.open() as session:
                await session.call(call("dial", number=1))
                assert (await session.call(call("listen"))).text == "[1]"
        async with gateway.open(Task(tools=())) as session:  # Without its tools, no episode begins.
            assert await session.finish() == {}
    assert sys.modules["safe"].Safe.made == 1


async def test_method_that_is_interrupted_ends_the_episode_and_its_object(load: Load) -> None:
    async with load(timeout_s=0.1) as gateway:
        async with gateway.open() as session:
            assert (await session.call(call("lean"))).outcome is Outcome.TIMEOUT
            after = await session.call(call("listen"))
            assert after.outcome is Outcome.CANCELLED and "earlier call was interrupted" in (after.reason or "")
            assert await session.finish() == {}
        sys.modules["safe"].GATE.set()
        async with gateway.open() as session:
            assert (await session.call(call("listen"))).outcome is Outcome.OK
    assert sys.modules["safe"].Safe.made == 2


@pytest.mark.parametrize(
    ("name", "entry", "problem"),
    [
        ("safe.Wall", {}, r"class_name: Wall has no public method but `reset`"),
        ("safe.make_nothing", {}, r"class_name: makes a dict, which is no environment"),
        ("safe.Odd", {}, r"Odd.look: cannot be a tool: parameter `\*args"),
        ("safe.Safe", {"config": {"keys": 2}}, "creating the tool failed: TypeError"),
        ("safe.Safe", {"isolation": "sandbox"}, "isolation: does not apply to an environment class"),
        ("safe.Safe", {"description": "A safe."}, "description: does not apply to an environment class"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(name: str, entry: dict[str, Any], problem: str, load: Load) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(name, **entry)
