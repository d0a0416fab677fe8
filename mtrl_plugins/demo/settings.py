"""The run file's `demo:`: which of a demo's tasks are drawn, and how its model is warm-started."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from trainer.rollout.run_part import RunPart

if TYPE_CHECKING:
    from trainer.rollout.settings import BaseRolloutSettings


class DemoSettings(RunPart):
    """Tasks and model of a demo."""

    key: ClassVar[str] = "demo"

    kinds: tuple[str, ...] = ()
    """The kinds of tasks; by default all of the demo's job."""
    warm: Literal["habit", "plain"] = "habit"
    """How the model is warm-started: `habit` teaches it to guess, `plain` shows it other kinds of tasks only."""

    @classmethod
    def read(cls, settings: BaseRolloutSettings) -> DemoSettings:
        """Those of a run, or the defaults."""
        return cls.of(settings) or cls()

    def check(self, settings: BaseRolloutSettings) -> None:
        if self.warm != "habit" and getattr(settings, "model", None) in ("sight", "shelves", "shell"):
            raise ValueError("only the model `demo` has more than one warm start; leave `warm` out")
