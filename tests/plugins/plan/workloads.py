"""Workloads, limits and clusters for simulations."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mtrl_plugins.plan.speeds import Cluster, EngineSpeed, TrainerSpeed
from mtrl_plugins.plan.workload import JobLimits, RolloutScript, TurnScript, Workload

MODES = ("synchronous", "one_step_off", "asynchronous")


def make_script(turns: int, written: int, answer_s: float, *, prompt: int = 10, answer: int = 5) -> RolloutScript:
    """Turns that are all alike; the last one has no answer."""
    return tuple(
        TurnScript(prompt + turn * (written + answer), written, answer_s if turn < turns - 1 else 0.0)
        for turn in range(turns)
    )


def constant_workload(turns: int = 2, written: int = 10, answer_s: float = 1.0, **more: Any) -> Workload:
    return Workload(((make_script(turns, written, answer_s),),), **more)


def make_limits(mode: str = "synchronous", **changes: Any) -> JobLimits:
    """Limits of a small job, of which admission is none."""
    defaults = {"prompts": 4, "n": 2, "steps": 100, "open": 1000, "writing": 1000}
    return JobLimits(mode, **{**defaults, **changes})


def make_cluster(servers: int = 1, engine: EngineSpeed | None = None, **changes: Any) -> Cluster:
    engine = engine or EngineSpeed(0.1, sequence_s=0.01)
    return Cluster(servers, engine, TrainerSpeed(0.001, 0.5, 0.25), **changes)


turns = st.builds(TurnScript, st.integers(1, 50), st.integers(1, 30), st.sampled_from([0.0, 0.1, 3.0]))
workloads = st.builds(
    Workload,
    st.lists(
        st.lists(st.lists(turns, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
        min_size=1,
        max_size=3,
    ).map(tuple),
    host_turn_s=st.sampled_from([0.0, 0.01]),
    host_rollout_s=st.sampled_from([0.0, 0.02]),
    signal_share=st.sampled_from([0.0, 0.5, 1.0]),
)
limits = st.builds(
    JobLimits,
    st.sampled_from(MODES),
    prompts=st.integers(1, 6),
    n=st.integers(1, 4),
    steps=st.integers(2, 8),
    max_staleness=st.integers(1, 3),
    draws=st.integers(0, 2),
    open=st.integers(1, 20),
    waiting=st.integers(0, 10),
    writing=st.integers(1, 10),
    patience_s=st.sampled_from([0.05, 1.0]),
    reads_again=st.booleans(),
)
engines = st.builds(
    EngineSpeed,
    st.sampled_from([0.01, 0.1]),
    sequence_s=st.sampled_from([0.0, 0.02]),
    context_s=st.sampled_from([0.0, 0.0001]),
    floor_s=st.sampled_from([0.0, 0.05]),
    prefill_s=st.sampled_from([0.0, 0.001]),
    max_running=st.integers(1, 8),
)
clusters = st.builds(
    Cluster,
    st.integers(1, 3),
    engines,
    st.builds(TrainerSpeed, st.sampled_from([0.0, 0.01]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.2])),
)
