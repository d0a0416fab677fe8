"""What goes on is counted as it is told; counting never decides anything and costs a few microseconds a time."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

from gateway.types import Outcome
from trainer.engine.base import Written
from trainer.ledger import Author
from trainer.run.rollout import Rollout, StopReason
from trainer.steps import Step

STATES = ("pending", "generating", "calling", "interacting")
FINE = 25.0
"""Buckets of a duration's logarithm: neighbours are 4 % apart, and a few hundred of them hold any wait."""
SHORTEST_S = 1e-6
OPENINGS = 4096
"""Groups whose opening is remembered; by then the oldest is long over."""
EACH = 8
"""Turns of a rollout that are told of one by one."""


class Waits:
    """How long one tool took, each time, to within 2 %."""

    def __init__(self, buckets: Mapping[int, int] | None = None, longest_s: float = 0.0) -> None:
        self.buckets = Counter(buckets or {})
        self.longest_s = longest_s

    def add(self, seconds: float) -> None:
        self.buckets[round(FINE * math.log(max(seconds, SHORTEST_S)))] += 1
        self.longest_s = max(self.longest_s, seconds)

    @property
    def count(self) -> int:
        return self.buckets.total()

    def within_s(self, share: float) -> float:
        """As long as this share of them took at most."""
        wanted, met = math.ceil(share * self.count), 0
        for bucket in sorted(self.buckets):
            met += self.buckets[bucket]
            if met >= wanted:
                return min(math.exp(bucket / FINE), self.longest_s)
        return 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What had been counted at one moment."""

    elapsed_s: float
    total: int
    """Rollouts that there will be; 0 where nobody knows."""
    refilled: int
    """Rollouts that were made anew."""
    states: Mapping[str, int]
    stops: Mapping[StopReason, int]
    turns: int
    ended_turns: int
    """Of rollouts that are over."""
    written: int
    asked: int
    """Ids that the engine was asked to continue, at each turn again."""
    possible: int
    """Of these, how many could have needed no work: the same rollout or a sibling had asked with them before."""
    cached: int
    """Of these, how many did need none."""
    cached_by_turn: Mapping[int, float]
    """The same as a share, by which turn of its rollout asked, from 1."""
    cached_worst: float
    """And of the group that has least of it."""
    outcomes: Mapping[Outcome, int]
    waits: Mapping[str, Waits]
    """By tool, and by interaction as `feedback NAME`."""
    ends: Mapping[str, Mapping[Outcome, int]]
    """How their calls ended, by the same names."""
    drifts: Mapping[str, int]
    """By cause, how often what stands in a ledger differs from what the template would write."""

    @property
    def ended(self) -> int:
        """Rollouts that are over, and not made anew."""
        return max(0, sum(self.stops.values()) - self.refilled)

    @property
    def left_s(self) -> float | None:
        """At the pace so far, of the turns still to come.

        Rollouts that are over are the short ones, and all turns shared among them are too many for each: the truth
        lies between the two, and both come to it in the end.
        """
        if not self.total or not self.ended_turns:
            return None
        each = (self.ended_turns + self.turns) / 2 / sum(self.stops.values())
        to_come = each * (self.total + self.refilled) - self.turns
        return max(0.0, to_come * self.elapsed_s / self.turns) if self.ended < self.total else 0.0

    @property
    def slowest(self) -> tuple[str, Waits] | None:
        """The tool that one call in twenty waits longest for."""
        return max(self.waits.items(), key=lambda item: item[1].within_s(0.95), default=None)

    @property
    def metrics(self) -> dict[str, float]:
        """The same as numbers by area/name; what is not known yet is left out."""
        return dict(self._metrics())

    def _metrics(self) -> Iterator[tuple[str, float]]:
        for state in STATES:
            yield f"rollouts/{state}", self.states.get(state, 0)
        yield "rollouts/ended", self.ended
        yield "rollouts/refilled", self.refilled
        yield "turns/count", self.turns
        yield "tokens/written", self.written
        yield "tokens/asked", self.asked
        yield "tokens/cached", self.cached
        yield "tokens/possible", self.possible
        yield "time/elapsed_s", self.elapsed_s
        if self.elapsed_s:
            yield "tokens/written_per_s", self.written / self.elapsed_s
        if self.possible:
            yield "tokens/cached_of_possible", self.cached / self.possible
            yield "tokens/cached_of_possible_worst_group", self.cached_worst
        for turn, share in self.cached_by_turn.items():
            yield f"tokens/cached_of_possible_turn_{turn}", share
        if self.left_s is not None:
            yield "time/left_s", self.left_s
        for stop, count in self.stops.items():
            yield f"stops/{stop}", count
        for outcome, count in self.outcomes.items():
            yield f"outcomes/{outcome}", count
        for cause, count in self.drifts.items():
            yield f"drift/{cause}", count
        yield from self._of_tools()

    def _of_tools(self) -> Iterator[tuple[str, float]]:
        for name, waits in self.waits.items():
            yield f"tools/{name}/count", waits.count
            yield f"tools/{name}/p50_s", waits.within_s(0.5)
            yield f"tools/{name}/p95_s", waits.within_s(0.95)
            yield f"tools/{name}/max_s", waits.longest_s
        for name, ends in self.ends.items():
            for outcome, count in ends.items():
                yield f"tools/{name}/{outcome}", count


@dataclass(slots=True)
class _Share:
    """Of ids that could have needed no work, those that did need none."""

    possible: int = 0
    cached: int = 0

    @property
    def value(self) -> float:
        return self.cached / self.possible if self.possible else 1.0


class Counts:
    """A `Watch` that counts. Told by one thread, asked by any."""

    def __init__(self, total: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._clock, self._began = clock, clock()
        self._lock = Lock()
        self._now: dict[str, str] = {}
        self._known: dict[str, int] = {}
        """Ids that an engine was given, by rollout; by group, of its opening."""
        self._openings: dict[str, int] = {}
        self._turns: Counter[str] = Counter()
        self._of_turn: defaultdict[int, _Share] = defaultdict(_Share)
        self._of_group: defaultdict[str, _Share] = defaultdict(_Share)
        self._sums: Counter[str] = Counter()
        self._states: Counter[str] = Counter()
        self._stops: Counter[StopReason] = Counter()
        self._outcomes: Counter[Outcome] = Counter()
        self._waits: dict[str, Waits] = {}
        self._ends: defaultdict[str, Counter[Outcome]] = defaultdict(Counter)
        self._drifts: Counter[str] = Counter()

    def anew(self, total: int = 0) -> Counts:
        """Counts from here on; what is under way stays so."""
        after = Counts(total, clock=self._clock)
        with self._lock:
            after._now, after._known = dict(self._now), dict(self._known)
            after._states, after._turns = Counter(self._states), Counter(self._turns)
        return after

    def state(self, key: str, state: str) -> None:
        with self._lock:
            before = self._now.get(key)
            if before is None:
                self._begin(key)
            else:
                self._states[before] -= 1
            self._now[key] = state
            self._states[state] += 1

    def wrote(self, key: str, written: Written, asked: int) -> None:
        with self._lock:
            self._turns[key] += 1
            sums = self._sums
            sums["turns"] += 1
            sums["written"] += len(written.ids)
            sums["asked"] += asked
            sums["cached"] += written.cached
            possible = max(self._possible(key, asked), written.cached)
            sums["possible"] += possible
            for one in (self._of_turn[self._turns[key]], self._of_group[key.partition("/")[0]]):
                one.cached += written.cached
                one.possible += possible
            self._known[key] = asked + len(written.ids)

    def answered(self, key: str, step: Step, seconds: float) -> None:
        with self._lock:
            for outcome in step.outcomes:
                self._outcomes[outcome] += 1
            if step.author is Author.FEEDBACK:
                if step.source:
                    self._wait(f"feedback {step.source}", seconds)
                    self._ends[f"feedback {step.source}"].update(step.outcomes)
                return
            for told in step.info.get("tools", ()):
                if told["outcome"] != Outcome.INVALID:  # It reached no tool, and its name is the policy's invention.
                    self._wait(told["name"], told["elapsed_s"])
                    self._ends[told["name"]][told["outcome"]] += 1

    def ended(self, key: str, rollout: Rollout) -> None:
        with self._lock:
            before = self._now.pop(key, None)
            if before is None:
                self._begin(key)
            else:
                self._states[before] -= 1
            self._stops[rollout.stop] += 1
            self._sums["ended_turns"] += self._turns.pop(key, 0)
            self._known.pop(key, None)
            self._drifts.update(rollout.infos.get("drift", {}))

    def seen(self) -> Seen:
        with self._lock:
            return Seen(
                elapsed_s=self._clock() - self._began,
                total=self.total,
                refilled=self._sums["refilled"],
                states=dict(self._states),
                stops=dict(self._stops),
                turns=self._sums["turns"],
                ended_turns=self._sums["ended_turns"],
                written=self._sums["written"],
                asked=self._sums["asked"],
                possible=self._sums["possible"],
                cached=self._sums["cached"],
                cached_by_turn={
                    turn: self._of_turn[turn].value for turn in range(1, EACH + 1) if turn in self._of_turn
                },
                cached_worst=min((one.value for one in self._of_group.values()), default=1.0),
                outcomes=dict(self._outcomes),
                drifts=dict(self._drifts),
                waits={name: Waits(waits.buckets, waits.longest_s) for name, waits in self._waits.items()},
                ends={name: dict(ends) for name, ends in self._ends.items()},
            )

    @property
    def written(self) -> int:
        """Tokens so far."""
        return self._sums["written"]

    def snapshot(self) -> dict[str, float]:
        """Metrics by area/name."""
        return self.seen().metrics

    def _begin(self, key: str) -> None:
        """A rollout's key ends with its index, and with `.attempt` where it is made anew."""
        self._sums["refilled"] += "." in key.rpartition("/")[2]

    def _possible(self, key: str, asked: int) -> int:
        """An engine has worked on all ids that it was given but the last, which nobody was asked to follow yet."""
        known = self._known.get(key)
        if known is None:
            siblings = key.rpartition("/")[0]
            known = self._openings.get(siblings, 1)
            self._openings[siblings] = asked
            if len(self._openings) > OPENINGS:
                del self._openings[next(iter(self._openings))]
        return max(0, min(known, asked) - 1)

    def _wait(self, name: str, seconds: float) -> None:
        if name not in self._waits:
            self._waits[name] = Waits()
        self._waits[name].add(seconds)
