"""Laws of the simulation: nothing is lost, nothing is older than its bound, constant work has closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from mtrl_plugins.plan.simulate import simulate
from mtrl_plugins.plan.speeds import Cluster
from mtrl_plugins.plan.workload import JobLimits, Workload
from tests.plugins.plan.workloads import (
    clusters,
    constant_workload,
    limits,
    make_cluster,
    make_limits,
    workloads,
)

CLOSE = pytest.approx


@given(limits, workloads, clusters)
@settings(max_examples=120, deadline=None)
def test_simulations_lose_nothing_and_respect_every_limit(job: JobLimits, workload: Workload, cluster: Cluster) -> None:
    simulation = simulate(job, workload, cluster, steps=4, warmup=0)
    assert len(simulation.steps) == min(4, job.steps)
    assert simulation.started == simulation.ended + simulation.under_way
    assert simulation.most_under_way <= job.open + job.waiting
    bound = {"synchronous": 0, "one_step_off": 1, "asynchronous": job.max_staleness}[job.mode]
    assert simulation.staleness <= bound
    for step in simulation.steps:
        assert step.seconds == CLOSE(step.waiting_s + step.learning_s + step.publishing_s)
        assert 0 <= step.engine_busy_s <= cluster.servers * step.seconds * (1 + 1e-9)
        assert step.sequence_s <= job.writing * step.seconds * (1 + 1e-9)
    if job.mode == "synchronous":
        assert simulation.under_way == 0


@given(limits, workloads, clusters)
@settings(max_examples=20, deadline=None)
def test_same_seed_gives_the_same_simulation(job: JobLimits, workload: Workload, cluster: Cluster) -> None:
    assert simulate(job, workload, cluster, seed=3) == simulate(job, workload, cluster, seed=3)


def test_constant_synchronous_step_has_its_closed_form() -> None:
    """Eight rollouts of two turns of ten tokens: twenty decode steps with eight sequences, an answer, an update."""
    simulation = simulate(make_limits(), constant_workload(), make_cluster())
    generating = 20 * (0.1 + 8 * 0.01)
    row_tokens = 4 * (2 * 35 - 10)  # A prompt of 10, two turns of 10, an answer of 5; the prompt is shared by two.
    learning = 0.5 + 0.001 * row_tokens
    assert simulation.step_s == CLOSE(generating + 1.0 + learning + 0.25)
    assert simulation.engine_idle == CLOSE(1 - generating / simulation.step_s)
    assert simulation.trainer_idle == CLOSE((generating + 1.0) / simulation.step_s)


def test_one_process_that_plays_rollouts_can_be_what_everyone_waits_for() -> None:
    workload = constant_workload(turns=1, host_turn_s=1.0)
    one = simulate(make_limits(), workload, make_cluster())
    four = simulate(make_limits(), workload, make_cluster(host_workers=4))
    assert one.steps[0].waiting_s - four.steps[0].waiting_s == CLOSE(8 - 2)
    assert one.host_busy > four.host_busy
