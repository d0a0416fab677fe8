"""The run file's `dice:`, and what it opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from pydantic import PositiveInt

from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.toolset import Toolset
from trainer.rollout.run_part import RunPart


class DiceSettings(RunPart):
    """Tasks about dice, with the tool that rolls them."""

    key: ClassVar[str] = "dice"
    brings_rows: ClassVar[bool] = True

    sides: PositiveInt = 6
    """Sides of each die."""

    def describe(self) -> str:
        return f"dice with {self.sides} sides are rolled"

    def make_toolset(self) -> Toolset:
        def roll(times: int) -> str:
            """Rolls the die, and adds up what it shows."""
            draw = Random(times)
            return str(sum(draw.randint(1, self.sides) for _ in range(times)))

        return NativeToolset([FunctionTool(roll)])

    def find_rows(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        if name != self.key:
            return None
        return [{"id": f"roll-{times}", "prompt": f"Roll the die {times} times."} for times in range(1, 9)]
