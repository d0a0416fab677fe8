"""Restarts of ranks as a metric: each counts once, also where steps are made again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.distributed.rank_environment import RankRestarts, count_restarts


def test_launchers_say_how_often_they_started_the_ranks_again() -> None:
    assert count_restarts({}) == 0
    assert count_restarts({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2 == count_restarts({"SLURM_RESTART_COUNT": "2"})
    assert count_restarts({"MTRL_RESTARTS": "1", "SLURM_RESTART_COUNT": "7"}) == 1, "the nearest launcher's"
    assert count_restarts({"SLURM_RESTART_COUNT": "?"}) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_metrics_of_a_run_add_up_to_the_restarts_of_its_launcher(lives: list[tuple[int, bool]]) -> None:
    """In each life the ranks make some steps, and may save after the last; then they are lost, but in the last one."""
    reported: list[float] = []
    kept, saved = 0, 0
    for total, (steps, saves) in enumerate([*lives, (1, True)]):
        restarts = RankRestarts(2, total, saved)
        del reported[kept:]  # As `metrics.jsonl` is cut back to the checkpoint.
        reported += [restarts.take_metrics()["distributed/restarts"] for _ in range(steps)]
        if saves and steps:
            kept, saved = len(reported), total
    assert sum(reported) == len(lives)


def test_restarts_of_an_earlier_launcher_are_not_counted_again() -> None:
    assert RankRestarts(2, total=0, saved=3).take_metrics() == {"distributed/restarts": 0.0}
    restarts = RankRestarts(4, total=1, saved=3)
    assert restarts.describe() == "4 of 4 up, 1 restarts"
    assert [restarts.take_metrics()["distributed/restarts"] for _ in range(2)] == [1.0, 0.0]
