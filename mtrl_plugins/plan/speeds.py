"""How fast an engine server and a trainer are: the few numbers that a simulation needs of either."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """An engine server. A decode step gives one token to each running sequence; it takes `fixed_s` plus the running
    sequences' shares (bound by memory bandwidth), but at least `floor_s` for each of them (bound by arithmetic)."""

    fixed_s: float
    """Seconds of a step however many sequences run: reading the weights, and launching."""
    sequence_s: float = 0.0
    """More seconds for each running sequence."""
    context_s: float = 0.0
    """More seconds for each token in the running sequences' contexts, whose keys and values are read."""
    floor_s: float = 0.0
    """The least seconds for each running sequence."""
    prefill_s: float = 0.0
    """Seconds for each token that is read into the cache; decoding waits meanwhile."""
    max_running: int = 1 << 30
    """Sequences that the cache has room for; further ones wait."""

    def step_s(self, running: int, context: float) -> float:
        """Seconds of a decode step."""
        bandwidth_s = self.fixed_s + running * self.sequence_s + context * self.context_s
        return max(bandwidth_s, running * self.floor_s)


@dataclass(frozen=True, slots=True)
class TrainerSpeed:
    """All ranks of a trainer together."""

    token_s: float
    """Seconds of an update for each token of its rows."""
    fixed_s: float = 0.0
    """Seconds of an update however many tokens it has."""
    publish_s: float = 0.0
    """Seconds until all servers have new weights."""

    def update_s(self, tokens: float) -> float:
        """Seconds of an update; without tokens there is none."""
        return self.fixed_s + tokens * self.token_s if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run, as the simulation sees them."""

    servers: int
    engine: EngineSpeed
    trainer: TrainerSpeed
    host_workers: float = 1.0
    """Processes that play rollouts (`rollout.workers`, or the training process): they parse turns, call tools, build
    ledgers."""
    is_shared: bool = False
    """Whether engine and trainer share one processor, as on a CPU: each takes twice as long while both work."""

    def shrink(self, factor: float) -> Cluster:
        """The cluster with this share of its servers and of its trainer's speed."""
        trainer = replace(self.trainer, token_s=self.trainer.token_s / factor)
        servers, workers = max(1, round(self.servers * factor)), self.host_workers * factor
        return replace(self, servers=servers, trainer=trainer, host_workers=workers)
