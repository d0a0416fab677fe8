"""A run as pandas data frames: one row per step, per rollout and per tool call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.errors import ConfigError
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import METRICS_FILE, read_metrics
from trainer.storage.token_credit import get_step
from trainer.view.plot import SuccessCriterion

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


class RunTables(NamedTuple):
    """The tables of a run."""

    steps: pandas.DataFrame
    """Metrics, indexed by step; empty if nothing was trained."""
    rollouts: pandas.DataFrame
    """Rollouts, indexed by their number in `show`, with `reward/NAME` for each component. `step` is an index of
    `steps`, or 0 if no step used the rollout; `success` is 1 or 0 if the run's settings define success."""
    calls: pandas.DataFrame
    """Tool calls, with the `rollout` and `turn` that they belong to."""


def load(run: str | Path) -> RunTables:
    """Reads a whole run into data frames; for a large run this takes time and memory."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(f"data frames need pandas ({error})", remedy="pip install pandas") from error
    folder = Path(run)
    steps = pandas.DataFrame(read_metrics(folder / METRICS_FILE) if (folder / METRICS_FILE).exists() else [])
    rollouts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    mark = SuccessCriterion.load(folder)
    for number, rollout in Rollouts(folder).numbered():
        rollouts.append({"rollout": number} | _rollout_row(rollout, mark))
        calls += ({"rollout": number} | call for call in _call_rows(rollout))
    return RunTables(
        steps.set_index("step") if len(steps) else steps,
        pandas.DataFrame(rollouts, columns=None if rollouts else ["rollout"]).set_index("rollout"),
        pandas.DataFrame(calls, columns=None if calls else ["rollout", "turn", "name", "arguments", "outcome"]),
    )


def _rollout_row(rollout: Rollout, mark: SuccessCriterion) -> dict[str, Any]:
    ledgers, step, success = rollout.ledgers, get_step(rollout), mark.is_success(rollout.rewards)
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
        "asked": sum(ledger.prompt_tokens for ledger in ledgers),
        "cached": sum(ledger.cached_tokens for ledger in ledgers),
        "calls": sum(len(turn.calls) for turn in rollout.turns),
        **{f"time/{phase}_s": spent for phase, spent in rollout.timing.items()},
    }


def _call_rows(rollout: Rollout) -> Iterator[dict[str, Any]]:
    turn = -1
    for ledger in rollout.ledgers:
        for entry, answer in _turns_with_answers(ledger):
            turn += 1
            details = answer.info.get("tools", ()) if answer else ()
            outcomes = answer.outcomes if answer else ()
            for call, outcome, more in zip_longest(entry.calls, outcomes, details):
                yield {
                    "turn": turn,
                    "name": call.name if call else None,
                    "arguments": call.arguments if call else None,
                    "outcome": str(outcome) if outcome else None,
                    "elapsed_s": (more or {}).get("elapsed_s"),
                }


def _turns_with_answers(ledger: Ledger) -> Iterator[tuple[Entry, Entry | None]]:
    """Each turn of the policy, with the entry of the tools that answered it."""
    for entry, behind in zip_longest(ledger.entries, ledger.entries[1:]):
        if entry.author is Author.POLICY:
            yield entry, behind if behind and behind.author is Author.TOOL else None
