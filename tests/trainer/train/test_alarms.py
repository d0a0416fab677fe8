"""An alarm says what is seen, what it likely means and what to turn; once, until all was well for a while."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf, nan

import pytest
from pydantic import BaseModel

from trainer.run.rollout import StopReason
from trainer.train.alarms import ALARMS, KNOBS, WELL, Alarms
from trainer.train.settings import TrainSettings

Told = dict[str, float]
GOOD: Told = {
    "reward/mean": 0.5,
    "success/sampled": 0.5,
    "entropy": 0.8,
    "groups/teaching": 12.0,
    "kl/old": 0.001,
    "kl/reference": 0.02,
    "mismatch/kl": 1e-9,
    "rollout/count": 128.0,
    "rollout/lost": 0.0,
    "rollout/turns": 2.5,
    "rollout/truncated": 0.0,
    "stops/done": 1.0,
}


def heard(*steps: Told, reasons: Mapping[str, int] = {}) -> list[str]:
    """All that is said over these steps, each of which is well but for what is given."""
    alarms = Alarms()
    return [said for step in steps for said in alarms.look(GOOD | step, reasons)]


def test_a_run_that_is_well_is_left_in_peace() -> None:
    climbing = [
        {"reward/mean": step / 50, "success/sampled": step / 50, "entropy": 1 - step / 60} for step in range(50)
    ]
    looked = [
        step | ({"eval/greedy": step["success/sampled"]} if place % 5 == 0 else {})
        for place, step in enumerate(climbing)
    ]
    assert heard(*looked) == []


def test_truncation_that_rises_is_told_before_all_is_cut_off() -> None:
    rising = [{"rollout/truncated": 0.02 * step} for step in range(12)]
    (said,) = heard(*rising)
    assert said.startswith("more and more rollouts are cut off") and "`limits.rollout_tokens`" in said
    assert heard(*[{"rollout/truncated": 0.3}] * 12) == []


def test_tools_that_fail_are_told_with_how_most_of_them_end() -> None:
    calls = {"engine/outcomes/ok": 50.0, "engine/outcomes/timeout": 40.0, "engine/outcomes/error": 5.0}
    (said,) = heard(calls)
    assert said.startswith("47% of the answers to calls are failures, 40 of 95 answers are `timeout`")
    assert heard(calls | {"engine/outcomes/ok": 500.0}) == []
    assert heard({"engine/outcomes/error": 5.0}) == [], "so few say nothing"
    assert heard({"engine/outcomes/invalid": 95.0}) == [], "what the policy gets wrong is no tool's failure"


def test_one_tool_that_is_down_is_named_however_well_the_others_answer() -> None:
    calls = {"engine/outcomes/ok": 80.0, "engine/outcomes/unavailable": 20.0, "engine/tools/look up/p50_s": 0.1}
    tools = {"engine/tools/look up/ok": 80.0, "engine/tools/a/b/unavailable": 20.0, "engine/tools/rare/error": 3.0}
    (said,) = heard(calls | tools)
    assert said.startswith("100% of the answers to calls of `a/b` are failures, 20 of 20 answers are `unavailable`")
    assert heard(calls) == heard(calls | tools | {"engine/tools/a/b/ok": 80.0}) == []


def test_a_bound_on_staleness_that_bites_all_the_time_is_told() -> None:
    bitten = {"staleness/dropped": 3.0, "staleness/max": 1.0, "groups/count": 9.0}
    (said,) = heard(*[bitten] * 5)
    assert said.startswith("25% of the groups of the last 5 steps were too stale") and "`max_staleness`" in said
    assert heard(*[bitten] * 4, bitten | {"staleness/dropped": 0.0}, *[bitten] * 4) == []


def test_far_from_those_that_wrote_is_told_apart_from_a_step_that_is_too_large() -> None:
    (far,), (large,) = heard({"kl/old": 0.2, "staleness/max": 2.0}), heard({"kl/old": 0.2, "staleness/max": 0.0})
    assert "lower `max_staleness`" in far and "max_staleness" not in large


def test_a_run_that_ends_with_all_right_and_no_entropy_is_well() -> None:
    assert heard({"entropy": 0.8}, {"entropy": 0.001, "success/sampled": 0.99, "groups/teaching": 1.0}) == []


@pytest.mark.parametrize(
    ("success", "means", "remedy"),
    [
        (1.0, "100% succeed: the tasks have become too easy", "harder tasks"),
        (0.0, "0% succeed", "`curriculum`"),
        (0.5, "hardly on the attempt", "`n`"),
    ],
)
def test_no_group_teaches(success: float, means: str, remedy: str) -> None:
    (said,) = heard({"groups/teaching": 0.0, "success/sampled": success})
    assert said.startswith("no group teaches: ")
    assert means in said and remedy in said.partition("remedy: ")[2]


@pytest.mark.parametrize(("stop", "knob"), KNOBS.items())
def test_everything_is_cut_off_and_the_limit_is_named(stop: StopReason, knob: str) -> None:
    other = next(one for one in KNOBS if one is not stop)
    (said,) = heard({f"stops/{stop}": 0.8, f"stops/{other}": 0.15, "stops/done": 0.05})
    assert said.startswith(f"95% of the rollouts are cut off, 80% by {stop}\n")
    assert f"raise `{knob}`" in said


def test_rollouts_of_one_turn_are_not_cut_off_after_it() -> None:
    assert heard({"stops/assistant_turns": 1.0, "stops/done": 0.0, "rollout/turns": 1.0}) == []


def test_entropy_is_gone_while_there_is_something_left_to_learn() -> None:
    (said,) = heard({}, {}, {"entropy": 0.01, "success/sampled": 0.4})
    assert said.startswith("entropy is gone: 0.01 nats a token, 0.54 at the start, while 40% succeed")
    assert heard({"entropy": 0.015}, {"entropy": 0.01}) == []  # It was never much.


def looks(success: Iterable[float], greedy: float = 0.0) -> list[Told]:
    """40 steps on which the reward climbs, and every tenth an evaluation that finds so much more than the last."""
    steps: list[Told] = [{"reward/mean": 0.2 + place / 50, "success/sampled": one} for place, one in enumerate(success)]
    return [{"reward/mean": 0.2, "eval/greedy": 0.3}] + [
        step | ({"eval/greedy": 0.3 + greedy * (place // 10 + 1)} if place % 10 == 9 else {})
        for place, step in enumerate(steps)
    ]


def test_reward_that_rises_without_success_is_earned_by_something_else() -> None:
    (said,) = heard(*looks([0.3, 0.32] * 20))
    assert said.startswith("the reward rose from 0.29 to ")
    assert "greedy success on their tasks did not: 30% then, 30% now" in said
    assert "something else than the task" in said and "`mtrl-train show`" in said


def test_success_that_rises_by_samples_alone_is_sharpening() -> None:
    (said,) = heard(*looks([0.2 + place / 60 for place in range(40)]))
    assert "grows surer of what it could do already" in said


def test_success_that_rises_everywhere_is_no_alarm() -> None:
    assert heard(*looks([0.3] * 40, greedy=0.02)) == []
    assert heard(*looks([0.3] * 40, greedy=0.2)) == []


def test_a_reward_that_only_scatters_has_not_risen() -> None:
    steps = [step | {"reward/mean": 0.5 + (place * 7919 % 13 - 6) / 20} for place, step in enumerate(looks([0.3] * 40))]
    assert heard(*steps) == []


@pytest.mark.parametrize(
    ("metrics", "seen", "knob"),
    [
        ({"mismatch/kl": 0.05}, "mismatch/kl is 0.05 nats", "algorithm.mismatch.truncate"),
        ({"kl/old": 0.3}, "kl/old is 0.3 nats", "update.lr"),
        ({"kl/reference": 14.0}, "kl/reference is 14 nats", "algorithm.kl.coefficient"),
    ],
)
def test_policies_that_are_far_apart(metrics: Told, seen: str, knob: str) -> None:
    (said,) = heard(metrics)
    assert seen in said.splitlines()[0]
    assert knob in said.splitlines()[2]


def test_many_lost_rollouts_are_told_with_the_commonest_reason() -> None:
    reasons = {"tool_failed: search: no answer within 5 s.": 30, "wall_time: not over within 600 s": 2}
    (said,) = heard({"rollout/count": 96.0, "rollout/lost": 32.0}, reasons=reasons)
    assert said.splitlines()[0] == (
        "32 of 128 rollouts were lost to what surrounds the policy, 30 of them by:"
        " tool_failed: search: no answer within 5 s"
    )
    assert heard({"rollout/count": 126.0, "rollout/lost": 2.0}) == []
    assert heard({"rollout/count": 0.0, "rollout/lost": 8.0})[0].startswith("8 of 8 rollouts were lost")


def test_an_alarm_speaks_once_until_all_was_well_for_a_while() -> None:
    bad, well = {"groups/teaching": 0.0}, {}
    assert len(heard(bad, bad, bad)) == 1
    assert len(heard(bad, *[well] * (WELL - 1), bad)) == 1
    assert len(heard(bad, *[well] * WELL, bad)) == 2


def test_alarms_do_not_silence_each_other() -> None:
    assert len(heard({"groups/teaching": 0.0}, {"groups/teaching": 0.0, "kl/old": 1.0})) == 2


def test_who_goes_on_hears_no_alarm_twice() -> None:
    alarms, again = Alarms(), Alarms()
    past = [GOOD | {"mismatch/kl": 1.0} for _ in range(3)]
    assert [len(alarms.look(step)) for step in past] == [1, 0, 0]
    for step in past:
        again.look(step)
    assert alarms.look(past[0]) == again.look(past[0]) == []


@pytest.mark.parametrize("metrics", [{}, dict.fromkeys(GOOD, nan), {"eval/greedy": nan}, {"kl/old": inf}])
def test_what_is_not_known_raises_no_alarm(metrics: Told) -> None:
    assert Alarms().look(metrics) == []


def every_alarm() -> list[str]:
    cut: list[Told] = [{f"stops/{stop}": 1.0} for stop in KNOBS]
    none: list[Told] = [{"groups/teaching": 0.0, "success/sampled": success} for success in (0.0, 0.5, 1.0)]
    far: list[Told] = [{"mismatch/kl": 1.0}, {"kl/old": 1.0}, {"kl/reference": 99.0}, {"rollout/lost": 99.0}]
    said = [text for step in [*cut, *none, *far] for text in heard(step)]
    said += heard({}, {"entropy": 0.0}) + heard(*looks([0.3] * 40)) + heard(*looks([place / 40 for place in range(40)]))
    return said


def test_every_alarm_names_settings_that_there_are() -> None:
    named = {
        name for text in every_alarm() for name in re.findall(r"`([a-z_.]+)(?:: \w+)?`", text.partition("remedy")[2])
    }
    assert len(every_alarm()) >= len(ALARMS)
    assert {"update.lr", "limits.turn_tokens", "n", "reward"} <= named
    for name in named:
        model: type[BaseModel] = TrainSettings
        for part in name.split("."):
            field = model.model_fields[part]
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)


def test_every_alarm_says_what_is_seen_what_it_means_and_what_to_turn() -> None:
    for text in every_alarm():
        assert re.fullmatch(r"\S.*\n  likely: \S.*\n  remedy: \S.*", text)
