"""The run file's `history:`: what happens to a chat that nears the end of its context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import AfterValidator, Field, PositiveInt

from trainer.rollout.run_part import RunPart

if TYPE_CHECKING:
    from trainer.rollout.rollout import Rollout
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.steppers import Stepper

REQUEST = (
    "This chat is nearly full. All but the task will be removed. Call no tool now: summarise for yourself what was done"
    " and found, with names and numbers, and what remains."
)


def _check_kind(value: str) -> str:
    if value in ("summarise", "window") or ":" in value.strip(":"):
        return value
    raise ValueError("should be summarise, window, or a function of yours as module:name or folder/plugins.py:name")


class HistorySettings(RunPart):
    """What happens to a chat that nears the end of its context. The chats before and after are ledgers of one rollout.
    `history: window` is short for its `kind`."""

    key: ClassVar[str] = "history"

    kind: Annotated[str, AfterValidator(_check_kind)] = "summarise"
    """`summarise`: the policy goes on from the task and a summary that it writes. `window`: from the task and the
    latest turns, which fill half of `at`. Or a function as `module:name` or `folder/plugins.py:name`: it takes the
    messages before the latest turn, and returns those that replace them."""
    at: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """The share of `limits.rollout_tokens`, or of the engine's context, that a chat may fill; less for `summarise`
    where the next turn and a summary would not fit."""
    times: PositiveInt = 8
    """How often in a rollout; then the limit ends it."""
    request: Annotated[str, Field(min_length=1)] = REQUEST
    """What asks for a summary."""

    @classmethod
    def prepare(cls, values: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
        kind = values.get(cls.key)
        return {**values, cls.key: {"kind": kind}} if isinstance(kind, str) else values

    def check(self, settings: BaseRolloutSettings) -> None:
        if any(part.key == "agent" for part in settings.parts):
            raise ValueError("`history` and `agent` exclude each other: an agent keeps its own history")
        if self.kind == "window" and settings.template.history == "inference_template":
            problem = "`history: window` keeps turns as they were sampled, which `template.history: inference_template`"
            raise ValueError(f"{problem} renders again; use `template.history: full`, or `history: summarise`")
        limits = settings.limits
        name = "response_tokens" if (limits.response_tokens or limits.rollout_tokens) < limits.rollout_tokens else ""
        name = name or "rollout_tokens"
        tokens, turn = getattr(limits, name), limits.turn_tokens
        if self.kind == "summarise" and tokens * (1 - self.at) < 2 * turn:
            most = int(100 * (1 - 2 * turn / tokens)) / 100
            remedy = f"lower it to {most:g}" if most > 0 else f"raise `limits.{name}`"
            problem = f"leaves less of {tokens} tokens than two turns of `limits.turn_tokens` ({turn})"
            raise ValueError(f"`history.at` {problem}; {remedy}, or lower `limits.turn_tokens`")

    def describe(self) -> str:
        kinds = {"summarise": "is replaced by the policy's summary of it", "window": "loses its oldest turns"}
        what = kinds.get(self.kind, f"is shortened by {self.kind}")
        return f"a chat that fills {self.at:.0%} of its context {what}, up to {self.times} times"

    def wrap_stepper(self, stepper: Stepper) -> Stepper:
        from mtrl_plugins.history.compaction import Compaction

        return cast("Stepper", Compaction(self, stepper))

    def compute_metrics(self, rollouts: Iterable[Rollout]) -> Mapping[str, float]:
        """How often histories were shortened, and what the summaries were like."""
        infos = [rollout.infos[self.key] for rollout in rollouts if isinstance(rollout.infos.get(self.key), Mapping)]
        if not infos:
            return {}
        counts = sum((Counter(info) for info in infos), Counter[str]())
        return {
            "history/compactions": counts["compactions"] / len(infos),
            "history/summary_tokens": counts["summary_tokens"] / max(1, counts["summaries"]),
            "history/empty_summaries": float(counts["empty_summaries"]),
            "history/ignored_calls": float(counts["ignored_calls"]),
        }
