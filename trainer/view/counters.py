"""Counts running rollouts: states, tokens, cache hits, tool durations and outcomes, as metrics and for the panel."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock

from gateway.types import Outcome
from trainer.engine.base import Generation
from trainer.ledger import Author
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import Step

STATES = ("pending", "generating", "calling", "interacting")
BUCKETS_PER_E = 25.0
"""Buckets per factor of e in durations; neighbours are 4 % apart."""
SHORTEST_S = 1e-6
MAX_PROMPTS = 4096
"""Groups whose prompt length is remembered; older ones have ended long before."""
MAX_REPORTED_TURNS = 8
"""Turns with a cache metric of their own."""


class Durations:
    """A histogram of a tool's call durations, exact to 2 %."""

    def __init__(self, buckets: Mapping[int, int] | None = None, longest_s: float = 0.0) -> None:
        self.buckets = Counter(buckets or {})
        self.longest_s = longest_s

    def add(self, seconds: float) -> None:
        self.buckets[round(BUCKETS_PER_E * math.log(max(seconds, SHORTEST_S)))] += 1
        self.longest_s = max(self.longest_s, seconds)

    @property
    def count(self) -> int:
        return self.buckets.total()

    def quantile_s(self, share: float) -> float:
        """The duration that this share of calls did not exceed."""
        wanted, met = math.ceil(share * self.count), 0
        for bucket in sorted(self.buckets):
            met += self.buckets[bucket]
            if met >= wanted:
                return min(math.exp(bucket / BUCKETS_PER_E), self.longest_s)
        return 0.0


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """The counters at one moment."""

    elapsed_s: float
    total: int
    """The expected number of rollouts; 0 if it is unknown."""
    retried: int
    """Rollouts that replace failed ones."""
    states: Mapping[str, int]
    stops: Mapping[StopReason, int]
    turns: int
    ended_turns: int
    """Turns of rollouts that have ended."""
    written: int
    asked: int
    """Input tokens of all requests."""
    possible: int
    """Input tokens that could have been cached: the same rollout or a sibling had sent them before."""
    cached: int
    """Input tokens that were cached."""
    cached_by_turn: Mapping[int, float]
    """The share of possible tokens that were cached, by turn of the rollout, from 1."""
    cached_worst_group: float
    """The same share in the group where it is lowest."""
    outcomes: Mapping[Outcome, int]
    durations: Mapping[str, Durations]
    """By tool, and by interaction as `feedback NAME`."""
    outcomes_by_tool: Mapping[str, Mapping[Outcome, int]]
    """Outcomes of calls, by the same names."""
    drifts: Mapping[str, int]
    """By cause, how often a ledger differs from what the chat template renders."""

    @property
    def ended(self) -> int:
        """Rollouts that have ended and are not replaced."""
        return max(0, sum(self.stops.values()) - self.retried)

    @property
    def left_s(self) -> float | None:
        """The remaining time, from the pace so far and an estimate of the remaining turns.

        The turns per rollout are estimated between those of ended rollouts (biased to short ones) and all turns per
        ended rollout (biased to long ones); both converge.
        """
        if not self.total or not self.turns:
            return None
        if self.ended_turns:
            each = (self.ended_turns + self.turns) / 2 / sum(self.stops.values())
        else:  # Each rollout under way will at least have the turn that it is in.
            each = 1 + self.turns / max(1, sum(self.states.values()))
        to_come = each * (self.total + self.retried) - self.turns
        return max(0.0, to_come * self.elapsed_s / self.turns) if self.ended < self.total else 0.0

    @property
    def slowest(self) -> tuple[str, Durations] | None:
        """The tool with the largest 95th percentile of durations."""
        return max(self.durations.items(), key=lambda item: item[1].quantile_s(0.95), default=None)

    @property
    def metrics(self) -> dict[str, float]:
        """The counters as metrics by area/name, without those that are not known yet."""
        return dict(self._metrics())

    def _metrics(self) -> Iterator[tuple[str, float]]:
        for state in STATES:
            yield f"rollouts/{state}", self.states.get(state, 0)
        yield "rollouts/ended", self.ended
        yield "rollouts/refilled", self.retried
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
            yield "tokens/cached_of_possible_worst_group", self.cached_worst_group
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
        yield from self._tool_metrics()

    def _tool_metrics(self) -> Iterator[tuple[str, float]]:
        for name, waits in self.durations.items():
            yield f"tools/{name}/count", waits.count
            yield f"tools/{name}/p50_s", waits.quantile_s(0.5)
            yield f"tools/{name}/p95_s", waits.quantile_s(0.95)
            yield f"tools/{name}/max_s", waits.longest_s
        for name, ends in self.outcomes_by_tool.items():
            for outcome, count in ends.items():
                yield f"tools/{name}/{outcome}", count


@dataclass(slots=True)
class _CacheShare:
    """The share of cached tokens among those that could have been cached."""

    possible: int = 0
    cached: int = 0

    @property
    def value(self) -> float:
        return self.cached / self.possible if self.possible else 1.0


class RolloutCounters:
    """A `Watch` that counts events of rollouts; written by one thread, readable by any."""

    def __init__(self, total: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self._clock, self._start = clock, clock()
        self._idle_s, self._idle_since = 0.0, self._start
        self._lock = Lock()
        self._state_of: dict[str, str] = {}
        self._processed_tokens: dict[str, int] = {}
        """The tokens that the engine has seen, by rollout."""
        self._prompt_tokens: dict[str, int] = {}
        self._turns: Counter[str] = Counter()
        self._share_of_turn: defaultdict[int, _CacheShare] = defaultdict(_CacheShare)
        self._share_of_group: defaultdict[str, _CacheShare] = defaultdict(_CacheShare)
        self._sums: Counter[str] = Counter()
        self._states: Counter[str] = Counter()
        self._stops: Counter[StopReason] = Counter()
        self._outcomes: Counter[Outcome] = Counter()
        self._durations: dict[str, Durations] = {}
        self._outcomes_by_tool: defaultdict[str, Counter[Outcome]] = defaultdict(Counter)
        self._drifts: Counter[str] = Counter()

    def restart(self, total: int = 0) -> RolloutCounters:
        """New counters that start from zero, with the rollouts that are under way."""
        after = RolloutCounters(total, clock=self._clock)
        with self._lock:
            after._state_of, after._processed_tokens = dict(self._state_of), dict(self._processed_tokens)
            after._states, after._turns = Counter(self._states), Counter(self._turns)
        return after

    @property
    def engine_idle_s(self) -> float:
        """Seconds in which no rollout was generating."""
        with self._lock:
            self._account_idle()
            return self._idle_s

    def _account_idle(self) -> None:
        now = self._clock()
        if not self._states["generating"]:
            self._idle_s += now - self._idle_since
        self._idle_since = now

    def on_state(self, key: str, state: str) -> None:
        with self._lock:
            self._account_idle()
            before = self._state_of.get(key)
            if before is None:
                self._begin(key)
            else:
                self._states[before] -= 1
            self._state_of[key] = state
            self._states[state] += 1

    def on_generation(self, key: str, written: Generation, asked: int) -> None:
        with self._lock:
            self._turns[key] += 1
            sums = self._sums
            sums["turns"] += 1
            sums["written"] += len(written.ids)
            sums["asked"] += asked
            sums["cached"] += written.cached_tokens
            possible = max(self._cacheable(key, asked), written.cached_tokens)
            sums["possible"] += possible
            for share in (self._share_of_turn[self._turns[key]], self._share_of_group[key.partition("/")[0]]):
                share.cached += written.cached_tokens
                share.possible += possible
            self._processed_tokens[key] = asked + len(written.ids)

    def on_step(self, key: str, step: Step, seconds: float) -> None:
        with self._lock:
            for outcome in step.outcomes:
                self._outcomes[outcome] += 1
            if step.author is Author.FEEDBACK:
                if step.source:
                    self._add_duration(f"feedback {step.source}", seconds)
                    self._outcomes_by_tool[f"feedback {step.source}"].update(step.outcomes)
                return
            for call in step.info.get("tools", ()):
                if call["outcome"] != Outcome.INVALID:  # No tool has this name.
                    self._add_duration(call["name"], call["elapsed_s"])
                    self._outcomes_by_tool[call["name"]][call["outcome"]] += 1

    def on_end(self, key: str, rollout: Rollout) -> None:
        with self._lock:
            self._account_idle()
            before = self._state_of.pop(key, None)
            if before is None:
                self._begin(key)
            else:
                self._states[before] -= 1
            self._stops[rollout.stop] += 1
            self._sums["ended_turns"] += self._turns.pop(key, 0)
            self._processed_tokens.pop(key, None)
            self._drifts.update(rollout.infos.get("drift", {}))

    def snapshot(self) -> CounterSnapshot:
        with self._lock:
            return CounterSnapshot(
                elapsed_s=self._clock() - self._start,
                total=self.total,
                retried=self._sums["refilled"],
                states=dict(self._states),
                stops=dict(self._stops),
                turns=self._sums["turns"],
                ended_turns=self._sums["ended_turns"],
                written=self._sums["written"],
                asked=self._sums["asked"],
                possible=self._sums["possible"],
                cached=self._sums["cached"],
                cached_by_turn={
                    turn: self._share_of_turn[turn].value
                    for turn in range(1, MAX_REPORTED_TURNS + 1)
                    if turn in self._share_of_turn
                },
                cached_worst_group=min((share.value for share in self._share_of_group.values()), default=1.0),
                outcomes=dict(self._outcomes),
                drifts=dict(self._drifts),
                durations={name: Durations(waits.buckets, waits.longest_s) for name, waits in self._durations.items()},
                outcomes_by_tool={name: dict(ends) for name, ends in self._outcomes_by_tool.items()},
            )

    @property
    def written(self) -> int:
        """Generated tokens so far."""
        return self._sums["written"]

    def metrics(self) -> dict[str, float]:
        """Metrics by area/name."""
        return self.snapshot().metrics

    def _begin(self, key: str) -> None:
        """Counts retried rollouts, whose key ends in `.attempt` after the index."""
        self._sums["refilled"] += "." in key.rpartition("/")[2]

    def _cacheable(self, key: str, asked: int) -> int:
        """The tokens of a request that may be cached: all that the engine processed before, except the last one."""
        processed = self._processed_tokens.get(key)
        if processed is None:
            siblings = key.rpartition("/")[0]
            processed = self._prompt_tokens.get(siblings, 1)
            self._prompt_tokens[siblings] = asked
            if len(self._prompt_tokens) > MAX_PROMPTS:
                del self._prompt_tokens[next(iter(self._prompt_tokens))]
        return max(0, min(processed, asked) - 1)

    def _add_duration(self, name: str, seconds: float) -> None:
        if name not in self._durations:
            self._durations[name] = Durations()
        self._durations[name].add(seconds)
