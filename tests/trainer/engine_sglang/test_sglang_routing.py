"""Routing requests to replicas: prefix affinity and load balance."""

from __future__ import annotations

from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from trainer.engine.sglang.routing import MAX_EXTRA_REQUESTS, MAX_LOAD_RATIO, Routing


def test_siblings_share_a_replica_and_groups_are_spread() -> None:
    routes, loads = Routing(), [0, 0]
    places = []
    for group in range(4):
        for index in range(4):
            places.append(routes.choose(f"{group}/{index}", str(group), loads, [0, 1]))
            loads[places[-1]] += 1
    assert [set(places[start : start + 4]) for start in range(0, 16, 4)] == [{0}, {1}, {0}, {1}]
    assert routes.counts["placed"] == 4 and routes.counts["kept"] == 12


def test_rollout_keeps_its_replica_when_its_group_moves() -> None:
    routes = Routing()
    assert routes.choose("a/0", "a", [0, 0], [0, 1]) == 0
    assert routes.choose("a/1", "a", [50, 0], [0, 1]) == 1
    assert routes.choose("a/2", "a", [3, 3], [0, 1]) == 1
    assert routes.choose("a/0", "a", [3, 3], [0, 1]) == 0
    assert routes.counts == {"placed": 1, "kept": 2, "crowded": 1, "lost": 0}


def test_group_moves_for_a_queue_but_not_for_a_brief_imbalance() -> None:
    routes = Routing()
    assert [
        routes.choose("a/0", "a", loads, [0, 1]) for loads in ([0, 0], [MAX_EXTRA_REQUESTS, 0], [0, 24], [28, 4])
    ] == [0] * 4
    assert routes.choose("a/0", "a", [MAX_EXTRA_REQUESTS + 1, 0], [0, 1]) == 1
    assert routes.counts["crowded"] == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60), st.lists(st.integers(0, 40), min_size=3))
def test_chosen_replica_is_available_and_not_overloaded(asks: list[tuple[int, int]], seed: list[int]) -> None:
    routes, numbers = Routing(), cycle(seed)
    for group, index in asks:
        loads = [next(numbers) for _ in range(3)]
        up = [place for place in range(3) if next(numbers) % 3] or [1]
        chosen = routes.choose(f"{group}/{index}", str(group), loads, up)
        least = min(loads[place] for place in up)
        assert chosen in up
        assert loads[chosen] <= least + MAX_EXTRA_REQUESTS or loads[chosen] <= MAX_LOAD_RATIO * least
