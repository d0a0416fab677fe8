"""Counts running rollouts: states, tokens, cache hits, tool durations and outcomes, as metrics and for the panel."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Durations:
    """A histogram of a tool's call durations, exact to 2 %."""

    buckets: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0

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


@dataclass(slots=True)
class CacheShare:
    """The share of cached tokens among those that could have been cached."""

    possible: int = 0
    cached: int = 0

    @property
    def value(self) -> float:
        return self.cached / self.possible if self.possible else 1.0


@dataclass
class CounterSnapshot:
    """The counters at one moment."""

    total: int = 0
    """The expected number of rollouts; 0 if it is unknown."""
    elapsed_s: float = 0.0
    retried: int = 0
    """Rollouts that replace failed ones."""
    states: Counter[str] = field(default_factory=Counter)
    stops: Counter[StopReason] = field(default_factory=Counter)
    turns: int = 0
    ended_turns: int = 0
    """Turns of rollouts that have ended."""
    written: int = 0
    asked: int = 0
    """Input tokens of all requests."""
    possible: int = 0
    """Input tokens that could have been cached: the same rollout or a sibling had sent them before."""
    cached: int = 0
    """Input tokens that were cached."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    durations: defaultdict[str, Durations] = field(default_factory=lambda: defaultdict(Durations))
    """By tool, and by interaction as `feedback NAME`."""
    outcomes_by_tool: defaultdict[str, Counter[Outcome]] = field(default_factory=lambda: defaultdict(Counter))
    """Outcomes of calls, by the same names."""
    drifts: Counter[str] = field(default_factory=Counter)
    """By cause, how often a ledger differs from what the chat template renders."""
    shares_by_turn: defaultdict[int, CacheShare] = field(default_factory=lambda: defaultdict(CacheShare))
    """By turn of the rollout, from 1."""
    cached_worst_group: float = 1.0
    """The share of possible tokens that were cached in the group where it is lowest."""

    @property
    def cached_by_turn(self) -> dict[int, float]:
        """The same share by turn."""
        turns = (turn for turn in range(1, MAX_REPORTED_TURNS + 1) if turn in self.shares_by_turn)
        return {turn: self.shares_by_turn[turn].value for turn in turns}

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


class RolloutCounters:
    """A `Watch` that counts events of rollouts; written by one thread, readable by any."""

    def __init__(self, total: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = CounterSnapshot(total)
        self._clock, self._start = clock, clock()
        self._idle_s, self._idle_since = 0.0, self._start
        self._lock = Lock()
        self._state_of: dict[str, str] = {}
        self._processed_tokens: dict[str, int] = {}
        """The tokens that the engine has seen, by rollout."""
        self._prompt_tokens: dict[str, int] = {}
        self._turns: Counter[str] = Counter()
        self._share_of_group: defaultdict[str, CacheShare] = defaultdict(CacheShare)

    def restart(self, total: int = 0) -> RolloutCounters:
        """New counters that start from zero, with the rollouts that are under way."""
        after = RolloutCounters(total, clock=self._clock)
        with self._lock:
            after._state_of, after._processed_tokens = dict(self._state_of), dict(self._processed_tokens)
            after._counts.states, after._turns = Counter(self._counts.states), Counter(self._turns)
        return after

    @property
    def engine_idle_s(self) -> float:
        """Seconds in which no rollout was generating."""
        with self._lock:
            self._account_idle()
            return self._idle_s

    def _account_idle(self) -> None:
        now = self._clock()
        if not self._counts.states["generating"]:
            self._idle_s += now - self._idle_since
        self._idle_since = now

    def on_state(self, key: str, state: str) -> None:
        with self._lock:
            self._account_idle()
            self._leave_state(key)
            self._state_of[key] = state
            self._counts.states[state] += 1

    def on_generation(self, key: str, written: Generation, asked: int) -> None:
        with self._lock:
            self._turns[key] += 1
            counts, possible = self._counts, max(self._cacheable(key, asked), written.cached_tokens)
            counts.turns += 1
            counts.written += len(written.ids)
            counts.asked += asked
            counts.cached += written.cached_tokens
            counts.possible += possible
            for share in (counts.shares_by_turn[self._turns[key]], self._share_of_group[key.partition("/")[0]]):
                share.cached += written.cached_tokens
                share.possible += possible
            self._processed_tokens[key] = asked + len(written.ids)

    def on_step(self, key: str, step: Step, seconds: float) -> None:
        with self._lock:
            counts = self._counts
            counts.outcomes.update(step.outcomes)
            if step.author is Author.FEEDBACK:
                if step.source:
                    counts.durations[f"feedback {step.source}"].add(seconds)
                    counts.outcomes_by_tool[f"feedback {step.source}"].update(step.outcomes)
                return
            for call in step.info.get("tools", ()):
                if call["outcome"] != Outcome.INVALID:  # No tool has this name.
                    counts.durations[call["name"]].add(call["elapsed_s"])
                    counts.outcomes_by_tool[call["name"]][call["outcome"]] += 1

    def on_end(self, key: str, rollout: Rollout) -> None:
        with self._lock:
            self._account_idle()
            self._leave_state(key)
            self._counts.stops[rollout.stop] += 1
            self._counts.ended_turns += self._turns.pop(key, 0)
            self._processed_tokens.pop(key, None)
            self._counts.drifts.update(rollout.infos.get("drift", {}))

    def add_total(self, rollouts: int) -> None:
        """Increases the expected number of rollouts."""
        self._counts.total += rollouts

    def snapshot(self) -> CounterSnapshot:
        with self._lock:
            self._counts.elapsed_s = self._clock() - self._start
            self._counts.cached_worst_group = min((share.value for share in self._share_of_group.values()), default=1.0)
            return deepcopy(self._counts)

    @property
    def written(self) -> int:
        """Generated tokens so far."""
        return self._counts.written

    def metrics(self) -> dict[str, float]:
        """Metrics by area/name."""
        return self.snapshot().metrics

    def _leave_state(self, key: str) -> None:
        """Ends the rollout's present state. Of a new one, counts a retry, whose key ends in `.attempt`."""
        before = self._state_of.pop(key, None)
        if before is None:
            self._counts.retried += "." in key.rpartition("/")[2]
        else:
            self._counts.states[before] -= 1

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
