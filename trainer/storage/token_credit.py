"""credits.jsonl: the advantage and weight of each token in a train step, one line per step (the latest line counts).

    {"step": 3, "rollouts": {"3-0-5/sum-17/2": [[[34, 0, 0], [12, 0.71, 1]], ...]}}

By rollout name, one list for each ledger that has policy tokens, in order. A ledger is run-length encoded as
`[tokens, advantage, weight]`. Tokens of weight 0 are not trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from itertools import groupby
from math import inf, isfinite
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO

from gateway.line_file import iterate_lines
from trainer.rollout.rollout import Rollout

if TYPE_CHECKING:
    from trainer.algorithms.packing import BatchRow

CREDITS_FILE = "credits.jsonl"
GROUP_STEP = re.compile(r"(\d+)-\d+-\d+$")
"""The group name `step-draw-number` of a training run, from which the step of most rollouts is read."""
LINE_START = re.compile(rb'\{"step":(\d+),')
"""The start of a line that `dump_credits` wrote."""
CreditSpan = tuple[int, float, float]
"""A number of tokens, the advantage of each, and the weight of each."""


def dump_credits(step: int, rows: Iterable[BatchRow]) -> bytes:
    """The credits of a step as a line with its line end."""
    credits: dict[str, list[list[CreditSpan]]] = {}
    for row in rows:
        credits.setdefault(row.name, []).append(_to_spans(row))
    return json.dumps({"step": step, "rollouts": credits}, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    ) + (b"\n")


def truncate_credits(file: Path, step: float = inf) -> None:
    """Removes an incomplete last line and the lines of steps after `step`."""
    if not file.exists():
        return
    end = 0
    with file.open("r+b") as stream:
        for line in iterate_lines(stream):
            line_step = LINE_START.match(line.data)
            if not line.is_complete or (line_step and int(line_step[1]) > step):
                break
            end = line.end
        stream.truncate(end)


def _to_spans(row: BatchRow) -> list[CreditSpan]:
    spans = groupby(zip(row.advantages, row.weights, strict=True))
    return [
        (sum(1 for _ in tokens), _round(advantage) if weight else 0.0, _round(weight))
        for (advantage, weight), tokens in spans
    ]


def _round(value: float) -> float:
    """The value with six digits; 0 for non-finite values, which other checks report."""
    return float(f"{value:.6g}") if isfinite(value) else 0.0


def get_step(rollout: Rollout) -> int | None:
    """The step that a rollout was collected for or trained by; 0 if it was collected ahead and never trained."""
    step_in_name = GROUP_STEP.match(rollout.group)
    return int(step_in_name[1]) if rollout.step is None and step_in_name else rollout.step


class CreditReader:
    """Reads credits.jsonl while it may still grow: indexes the lines by step, and reads a line on access."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / CREDITS_FILE
        self._lock = Lock()
        self._line_of_step: dict[int, tuple[int, int]] = {}
        self._end = 0

    @property
    def steps(self) -> Set[int]:
        """Steps that have credits."""
        return self._update_index().keys()

    def read_rollout(self, rollout: Rollout) -> list[list[CreditSpan]] | None:
        """The credits of a rollout; None if no step trained on it."""
        step = get_step(rollout)
        return None if step is None else self.read(step, rollout.name)

    def read(self, step: int, rollout: str) -> list[list[CreditSpan]] | None:
        """The credits that a step gave to a rollout; None if the step did not train on it."""
        line = self._update_index().get(step)
        if line is None:
            return None
        try:
            with self.file.open("rb") as stream:
                stream.seek(line[0])
                credits: Mapping[str, list[list[CreditSpan]]] = json.loads(stream.read(line[1]))["rollouts"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None  # Credits are optional when a rollout is shown.
        return credits.get(rollout)

    def _update_index(self) -> Mapping[int, tuple[int, int]]:
        with self._lock:
            with suppress(OSError), self.file.open("rb") as stream:
                self._index_new_lines(stream)
            return dict(self._line_of_step)

    def _index_new_lines(self, stream: BinaryIO) -> None:
        if stream.seek(0, 2) < self._end or not self._is_same_file(stream):
            self._line_of_step, self._end = {}, 0
        for line in iterate_lines(stream, self._end):
            if not line.is_complete:
                return
            head = line.data[: line.data.find(b",")].removeprefix(b'{"step":')
            if head.isdigit() and not line.is_too_long:
                self._line_of_step[int(head)] = (self._end, line.end - line.start)
            self._end = line.end

    def _is_same_file(self, stream: BinaryIO) -> bool:
        """True if the last indexed step is still at its offset: a run can be restarted in the same folder."""
        if not self._line_of_step:
            return True
        step, (start, _) = max(self._line_of_step.items(), key=lambda item: item[1])
        head = b'{"step":%d,' % step
        stream.seek(start)
        return stream.read(len(head)) == head
