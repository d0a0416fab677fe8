"""A run as tables, for notebooks: a row a step, a row a rollout, a row a call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.errors import ConfigError
from trainer.ledger import Author, Entry, Ledger
from trainer.run.credits import step_of
from trainer.run.file import Rollouts
from trainer.run.history import NAME, history
from trainer.run.rollout import Rollout
from trainer.view.mark import Mark

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


class Frames(NamedTuple):
    steps: pandas.DataFrame
    """By step, what it measured; empty where nothing was trained."""
    rollouts: pandas.DataFrame
    """By the number that `show` counts; `reward/NAME` for each component. `step` is a row of `steps`, 0 of what no step
    took; `success` is 1 or 0, where the run's settings tell what that is."""
    calls: pandas.DataFrame
    """`rollout` and `turn` say where each belongs."""


def load(run: str | Path) -> Frames:
    """Everything is read at once: of a large run that takes its time, and memory."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(f"tables need pandas ({error})", remedy="pip install pandas") from error
    folder = Path(run)
    steps = pandas.DataFrame(history(folder / NAME) if (folder / NAME).exists() else [])
    rollouts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    mark = Mark.of(folder)
    for number, rollout in enumerate(Rollouts(folder)):
        rollouts.append({"rollout": number} | _row(rollout, mark))
        calls += ({"rollout": number} | call for call in _calls(rollout))
    return Frames(
        steps.set_index("step") if len(steps) else steps,
        pandas.DataFrame(rollouts, columns=None if rollouts else ["rollout"]).set_index("rollout"),
        pandas.DataFrame(calls, columns=None if calls else ["rollout", "turn", "name", "arguments", "outcome"]),
    )


def _row(rollout: Rollout, mark: Mark) -> dict[str, Any]:
    ledgers, step, success = rollout.ledgers, step_of(rollout), mark.success(rollout.rewards)
    return {
        "step": nan if step is None else step,
        "task": rollout.task,
        "kind": rollout.kind,
        "group": rollout.group,
        "index": rollout.index,
        "stop": str(rollout.stop),
        "reason": rollout.reason,
        "reward": nan if rollout.reward is None else rollout.reward,
        "success": nan if success is None else float(success),
        **{f"reward/{name}": value for name, value in rollout.rewards.items()},
        "turns": len(rollout.turns),
        "tokens": sum(map(len, ledgers)),
        "written": sum(len(turn.ids) for turn in rollout.turns),
        "asked": sum(ledger.asked for ledger in ledgers),
        "cached": sum(ledger.cached for ledger in ledgers),
        "calls": sum(len(turn.calls) for turn in rollout.turns),
        **{f"time/{phase}_s": spent for phase, spent in rollout.timing.items()},
    }


def _calls(rollout: Rollout) -> Iterator[dict[str, Any]]:
    turn = -1
    for ledger in rollout.ledgers:
        for entry, answer in _answered(ledger):
            turn += 1
            known = answer.info.get("tools", ()) if answer else ()
            outcomes = answer.outcomes if answer else ()
            for call, outcome, more in zip_longest(entry.calls, outcomes, known):
                yield {
                    "turn": turn,
                    "name": call.name if call else None,
                    "arguments": call.arguments if call else None,
                    "outcome": str(outcome) if outcome else None,
                    "elapsed_s": (more or {}).get("elapsed_s"),
                }


def _answered(ledger: Ledger) -> Iterator[tuple[Entry, Entry | None]]:
    """Each of the policy's turns, with what tools answered it."""
    for entry, behind in zip_longest(ledger.entries, ledger.entries[1:]):
        if entry.author is Author.POLICY:
            yield entry, behind if behind and behind.author is Author.TOOL else None
