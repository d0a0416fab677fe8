"""Laws of the simulation: nothing is lost, nothing is older than its bound, constant work has closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from mtrl_plugins.plan.simulate import simulate
from mtrl_plugins.plan.speeds import Cluster, EngineSpeed, TrainerSpeed
from mtrl_plugins.plan.workload import JobLimits, Workload
from tests.plugins.plan.workloads import (
    MODES,
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


def test_engine_slots_queue_the_rollouts_that_they_have_no_place_for() -> None:
    """With four slots for eight rollouts, four generate at a time: twice as many rounds, with half the sequences."""
    job, workload = make_limits(writing=4), constant_workload(turns=1)
    free = simulate(replace(job, writing=8), workload, make_cluster())
    queued = simulate(job, workload, make_cluster())
    assert queued.step_s - free.step_s == CLOSE(2 * 10 * (0.1 + 4 * 0.01) - 10 * (0.1 + 8 * 0.01))


def test_full_cache_of_a_server_queues_as_engine_slots_do() -> None:
    workload = constant_workload(turns=1)
    slots = simulate(make_limits(writing=4), workload, make_cluster())
    cache = simulate(make_limits(), workload, make_cluster(engine=EngineSpeed(0.1, sequence_s=0.01, max_running=4)))
    assert cache.step_s == CLOSE(slots.step_s)


def test_admission_starts_another_rollout_when_a_tool_is_slow() -> None:
    """Two may be open; with one more that waits, a rollout starts once another has waited for the patience of 0.5 s."""
    job = make_limits(prompts=3, n=1, open=2, waiting=1, patience_s=0.5)
    engine = EngineSpeed(0.1)
    patient = simulate(job, constant_workload(answer_s=5.0), make_cluster(engine=engine))
    assert patient.steps[0].waiting_s == CLOSE(1.0 + 0.5 + 1.0 + 5.0 + 1.0)
    strict = simulate(replace(job, waiting=0), constant_workload(answer_s=5.0), make_cluster(engine=engine))
    assert strict.steps[0].waiting_s == CLOSE(2 * (1.0 + 5.0 + 1.0))


def test_one_step_off_takes_as_long_as_the_longer_of_both() -> None:
    rolling = 20 * (0.1 + 8 * 0.01) + 1.0
    slow = replace(make_cluster(), trainer=TrainerSpeed(0.0, 20.0, 0.25))
    quick = replace(make_cluster(), trainer=TrainerSpeed(0.0, 0.5, 0.25))
    job = make_limits("one_step_off")
    assert simulate(job, constant_workload(), slow).step_s == CLOSE(20.25)
    # A step's rollouts start when the step before takes its own, and end before the publish.
    assert simulate(job, constant_workload(), quick).step_s == CLOSE(rolling + 0.25)


def test_processor_that_is_shared_takes_the_sum_of_both() -> None:
    """One step off on a CPU: rollouts and the update share the cores, so that nothing is gained."""
    job, workload = make_limits("one_step_off"), constant_workload(turns=2, answer_s=0.0)
    rolling = 20 * (0.1 + 8 * 0.01)
    for update in (0.5, 2.0, 10.0):
        cluster = replace(make_cluster(is_shared=True), trainer=TrainerSpeed(0.0, update, 0.0))
        assert simulate(job, workload, cluster).step_s == CLOSE(rolling + update)


def test_asynchronous_rollouts_fill_the_time_of_slow_updates() -> None:
    cluster = replace(make_cluster(), trainer=TrainerSpeed(0.0, 30.0, 0.0))
    simulation = simulate(make_limits("asynchronous"), constant_workload(), cluster, warmup=3)
    assert simulation.step_s == CLOSE(30.0)
    assert simulation.trainer_idle == CLOSE(0.0, abs=1e-9)
    assert simulation.dropped == 0


def test_asynchronous_mode_opens_no_more_groups_than_steps_can_take_in_time() -> None:
    job = make_limits("asynchronous", max_staleness=2)
    cluster = replace(make_cluster(), trainer=TrainerSpeed(0.0, 1000.0, 0.0))
    simulation = simulate(job, constant_workload(), cluster, steps=1, warmup=0)
    # What three versions may take is started at first, and with a new version as much as one step takes.
    assert simulation.most_under_way == 3 * job.prompts * job.n
    assert simulation.started == 4 * job.prompts * job.n


def test_generations_under_way_read_their_tokens_again_under_new_weights() -> None:
    engine = EngineSpeed(0.1, prefill_s=0.01)
    job, workload = make_limits("asynchronous", writing=8), constant_workload(turns=3, answer_s=0.0)
    again = simulate(job, workload, make_cluster(engine=engine), steps=8)
    kept = simulate(replace(job, reads_again=False), workload, make_cluster(engine=engine), steps=8)
    assert again.seconds > kept.seconds


def test_dynamic_sampling_replaces_groups_without_a_signal() -> None:
    job, workload = make_limits(draws=3), constant_workload(signal_share=0.0)
    simulation = simulate(job, workload, make_cluster())
    assert all(step.replaced == 3 * job.prompts for step in simulation.steps)
    assert all(step.learning_s == 0 for step in simulation.steps)


@pytest.mark.parametrize("mode", MODES)
def test_more_servers_are_never_slower_with_constant_work(mode: str) -> None:
    job, workload = make_limits(mode, prompts=12), constant_workload(answer_s=0.2)
    seconds = [simulate(job, workload, make_cluster(servers), steps=6).seconds for servers in (1, 2, 3, 6)]
    assert seconds == sorted(seconds, reverse=True)


def test_one_process_that_plays_rollouts_can_be_what_everyone_waits_for() -> None:
    workload = constant_workload(turns=1, host_turn_s=1.0)
    one = simulate(make_limits(), workload, make_cluster())
    four = simulate(make_limits(), workload, make_cluster(host_workers=4))
    assert one.steps[0].waiting_s - four.steps[0].waiting_s == CLOSE(8 - 2)
    assert one.host_busy > four.host_busy
