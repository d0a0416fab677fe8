"""A rollout from a row of data to a ledger: against real tools, with a policy that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Outcome, ToolResult
from gateway.types import Task as Asked
from tests.trainer.conversations import template_for
from tests.trainer.scripts import ASKS, HERMES, calling, gateway_of, says
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.config import RolloutLimits
from trainer.engine.base import EngineError, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.play import Player
from trainer.run.rollout import Rollout, StopReason
from trainer.steps import BackIntoThinking, Step, Stepper, ThinkAgain, ToolsAndFeedback, Turn
from trainer.task import Task
from trainer.template import Settings, Template


async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def over() -> ToolResult:
    """Says that the rollout is over."""
    return ToolResult(done=True, reward=0.5)


async def hang() -> None:
    """Never answers."""
    await anyio.sleep_forever()


async def down() -> None:
    """Breaks off."""
    raise ConnectionResetError("the line is dead")


async def long() -> str:
    """Says too much."""
    return "word " * 5000


def gateway(**limits: Any) -> Gateway:
    return gateway_of(add, over, hang, down, long, **limits)


PLAIN = Task("t", ASKS)
HEARD = Task("t", ASKS, asked=Asked(id="t", feedback="gsm8k", feedback_args={"ground_truth": "7"}))


async def play(
    answers: Sequence[Answer] | Callable[..., Answer],
    task: Task = PLAIN,
    *,
    template: Template | None = None,
    limits: RolloutLimits | None = None,
    stepper: Stepper | None = None,
    tools: Gateway | None = None,
) -> tuple[Rollout, ScriptedEngine]:
    said = iter(answers) if not callable(answers) else None
    engine = ScriptedEngine((lambda ids, sampling, key: next(said)) if said is not None else answers)  # type: ignore[arg-type]
    with anyio.fail_after(20):
        async with tools or gateway() as opened, engine:
            player = Player(
                engine,
                template or template_for(HERMES),
                opened,
                limits or RolloutLimits(rollout_tokens=100_000),
                stepper=stepper or ToolsAndFeedback(),
            )
            return await player.play(task, group="g"), engine


def authors(rollout: Rollout) -> list[str]:
    return [entry.author.value for entry in rollout.ledger]


async def test_calls_are_answered_by_tools_and_then_by_the_interaction() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": 3, "b": 4})), "It is #### 8", "Then #### 7")
    rollout, engine = await play(turns, HEARD, template=template)
    assert rollout.stop is StopReason.FEEDBACK_DONE
    assert authors(rollout) == ["task", "policy", "tool", "policy", "feedback", "policy", "feedback"]
    assert rollout.ledger.rewards == ((), (0.0,), (1.0,))
    assert rollout.rewards == {"feedback": 1.0}
    assert rollout.infos.get("drift") is None
    texts = [template.tokens.decode(entry.ids) for entry in rollout.ledger]
    assert "7" in texts[2] and "You need to reflect" in texts[4]
    assert [tuple(asked.ids) for asked in engine.asked] == [
        rollout.ledger.ids[: rollout.ledger.starts[place]] for place in (1, 3, 5)
    ], "each request begins with exactly the ids of the one before"


async def test_the_mask_is_who_wrote_the_token_and_sampled_ids_are_kept_as_sampled() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": 3, "b": 4})), "7")
    rollout, _ = await play(turns, template=template)
    ledger = rollout.ledger
    assert rollout.stop is StopReason.DONE
    written = tuple(token for token, mine in zip(ledger.ids, ledger.mask, strict=True) if mine)
    assert written == turns[0] + turns[1]
    assert sum(ledger.mask) == sum(len(turn) for turn in turns)


async def test_several_calls_run_at_once_and_their_answers_are_one_tail() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})), "2 and 4")
    rollout, _ = await play(turns, template=template)
    (tool,) = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
    assert [message["content"] for message in tool.messages] == ["2", "4"]
    assert tool.outcomes == (Outcome.OK, Outcome.OK)
    assert len({call.id for call in rollout.ledger.turns[0].calls}) == 2


async def test_a_call_that_is_wrong_is_answered_with_how_to_mend_it_and_counted() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": "three"})), calling(("nope", {})), "I give up")
    rollout, _ = await play(turns, template=template)
    tools = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
    assert [entry.outcomes for entry in tools] == [(Outcome.INVALID,), (Outcome.INVALID,)]
    assert "is not of type" in str(tools[0].messages[0]["content"]) and "no tool named" in str(tools[1].messages)
    assert rollout.stop is StopReason.DONE and not rollout.stop.infrastructure


async def test_a_policy_that_only_repeats_wrong_calls_is_stopped() -> None:
    template = template_for(HERMES)
    (turn,) = says(template, calling(("nope", {})))
    rollout, engine = await play(lambda ids, sampling, key: turn, template=template)
    assert rollout.stop is StopReason.INVALID_CALLS and len(engine.asked) == 3


async def test_a_policy_that_never_stops_is_cut_at_the_turns_limit_and_no_call_of_it_is_made() -> None:
    template = template_for(HERMES)
    endless = says(template, calling(("add", {"a": 1, "b": 1})) * 50, end=False)
    rollout, _ = await play(endless, template=template, limits=RolloutLimits(turn_tokens=40))
    assert rollout.stop is StopReason.LENGTH_TURN
    assert authors(rollout) == ["task", "policy"] and len(rollout.ledger.turns[0].ids) == 40


async def test_an_answer_that_does_not_fit_ends_the_rollout_and_takes_no_tokens() -> None:
    template = template_for(HERMES)
    rollout, _ = await play(
        says(template, calling(("long", {}))), template=template, limits=RolloutLimits(rollout_tokens=3000)
    )
    assert rollout.stop is StopReason.LENGTH_ROLLOUT
    assert rollout.ledger.entries[-1].ids == () and "does not fit" in rollout.reason


@pytest.mark.parametrize(
    ("limits", "stop", "turns"),
    [
        (RolloutLimits(assistant_turns=2), StopReason.ASSISTANT_TURNS, 2),
        (RolloutLimits(tool_calls=2), StopReason.TOOL_CALLS, 3),
        (RolloutLimits(wall_s=1.0), StopReason.WALL_TIME, 1),
    ],
)
async def test_each_limit_has_a_stop_reason_of_its_own(limits: RolloutLimits, stop: StopReason, turns: int) -> None:
    template = template_for(HERMES)
    name = "hang" if stop is StopReason.WALL_TIME else "add"
    (turn,) = says(template, calling((name, {"a": 1, "b": 1} if name == "add" else {})))
    rollout, _ = await play(lambda ids, sampling, key: turn, template=template, limits=limits)
    assert rollout.stop is stop and len(rollout.ledger.turns) == turns


async def test_user_turns_have_a_limit_apart_from_tool_calls() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": 1, "b": 1})), "#### 1", "#### 2", "#### 3")
    rollout, _ = await play(turns, HEARD, template=template, limits=RolloutLimits(user_turns=2))
    assert rollout.stop is StopReason.USER_TURNS and len(rollout.ledger.turns) == 4


@pytest.mark.parametrize(
    ("name", "limits", "words"), [("down", {}, "the line is dead"), ("hang", {"timeout_s": 0.05}, "no answer within")]
)
async def test_a_tool_that_breaks_ends_the_rollout_which_is_never_scored(name: str, limits: Any, words: str) -> None:
    template = template_for(HERMES)
    rollout, _ = await play(says(template, calling((name, {}))), HEARD, template=template, tools=gateway(**limits))
    assert rollout.stop is StopReason.TOOL_FAILED and rollout.stop.infrastructure
    assert words in rollout.reason and rollout.rewards == {} and rollout.reward is None


async def test_an_engine_that_fails_is_not_the_policys_failure() -> None:
    rollout, _ = await play([EngineError("out of memory: lower `rows`")])
    assert (rollout.stop, rollout.reason) == (StopReason.ENGINE_FAILED, "out of memory: lower `rows`")
    assert authors(rollout) == ["task"]


async def test_a_session_that_cannot_be_opened_is_a_failure_with_its_reason() -> None:
    rollout, _ = await play([], Task("t", ASKS, asked=Asked(tools=("no_such_tool",))))
    assert rollout.stop is StopReason.TOOL_FAILED and "no_such_tool" in rollout.reason


async def test_a_tool_may_say_that_it_is_over() -> None:
    template = template_for(HERMES)
    rollout, _ = await play(says(template, calling(("over", {}))), template=template)
    assert rollout.stop is StopReason.TOOL_DONE and rollout.rewards == {"call": 0.5}


async def test_cancelling_a_rollout_cancels_its_calls_and_closes_its_session() -> None:
    template = template_for(HERMES)
    engine = ScriptedEngine({"g/t/0": says(template, calling(("hang", {})))})
    with anyio.fail_after(10):
        async with gateway() as opened:
            with anyio.move_on_after(0.1):
                await Player(engine, template, opened).play(PLAIN, group="g")
            assert not opened.sessions


async def test_a_wrong_answer_opens_a_new_round() -> None:
    template = template_for(HERMES)
    stepper = ThinkAgain(lambda text, task: "7" in text, "No. Again.", tries=3)
    rollout, _ = await play(says(template, "8", "9", "7"), template=template, stepper=stepper)
    assert rollout.stop is StopReason.DONE and authors(rollout) == ["task", "policy"] + ["feedback", "policy"] * 2
    assert "No. Again." in template.tokens.decode(rollout.ledger.entries[2].ids)


async def test_a_continuation_goes_on_in_the_same_turn_and_is_masked() -> None:
    template = template_for(HERMES)
    stepper = BackIntoThinking(lambda text, task: "7" in text, "\nWait, that is wrong. ")
    open_end = says(template, "It is 8", end=False)[0]
    rollout, _ = await play([open_end, *says(template, "7")], template=template, stepper=stepper)
    decoded = template.tokens.decode(rollout.ledger.ids)
    assert decoded.endswith("It is 8\nWait, that is wrong. 7<|im_end|>")
    inserted = rollout.ledger.entries[2]
    start = rollout.ledger.starts[2]
    assert not any(rollout.ledger.mask[start : start + len(inserted.ids)])


async def test_a_plug_in_may_be_async_pass_information_on_and_end_the_rollout() -> None:
    class Stops:
        async def check_finished(self, turn: Turn) -> bool:
            return turn.number == 2

        async def step(self, turn: Turn) -> Step:
            return Step(messages=({"role": "user", "content": "more"},), info={"seen": turn.reply.content})

    rollout, _ = await play(says(template_for(HERMES), "one", "two"), stepper=Stops())
    assert rollout.stop is StopReason.STEP_DONE and rollout.infos["seen"] == "one"


async def test_a_plug_in_that_raises_ends_only_its_rollout_with_what_it_raised() -> None:
    class Broken(ToolsAndFeedback):
        async def step(self, turn: Turn) -> Step:
            raise KeyError("no such thing")

    rollout, _ = await play(says(template_for(HERMES), calling(("add", {}))), stepper=Broken())
    assert rollout.stop is StopReason.ERROR and "KeyError" in rollout.reason


async def test_seeds_differ_by_rollout_and_turn_and_are_the_same_in_every_run() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": 1, "b": 1})), "2")
    seeds = []
    for _ in range(2):
        _, engine = await play(turns, template=template)
        seeds.append([asked.sampling.seed for asked in engine.asked])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2


async def test_a_template_that_takes_reasoning_back_begins_a_ledger_anew_where_that_is_asked_for() -> None:
    family = FAMILIES["qwen3"]
    texts = ("<think>\nhm\n</think>\n\n#### 1", "<think>\nso\n</think>\n\n#### 7")
    kept = template_for(family)
    rollout, _ = await play(says(kept, *texts), HEARD, template=kept)
    assert rollout.earlier == () and "hm" in kept.tokens.decode(rollout.ledger.ids)
    anew = template_for(family, Settings(history="inference_template"))
    rollout, engine = await play(says(anew, *texts), HEARD, template=anew)
    assert len(rollout.earlier) == 1 and "hm" in anew.tokens.decode(rollout.earlier[0].ids)
    assert "hm" not in anew.tokens.decode(rollout.ledger.ids) and "so" in anew.tokens.decode(rollout.ledger.ids)
    assert engine.asked[1].ids == rollout.ledger.entries[0].ids
    assert sum(rollout.ledger.mask) == len(rollout.ledger.turns[0].ids)


async def test_a_continuation_under_a_template_that_takes_reasoning_back_goes_on_with_its_own_words() -> None:
    template = template_for(FAMILIES["qwen3"], Settings(history="inference_template"))
    stepper = BackIntoThinking(lambda text, task: "7" in text, "\nWait, that is wrong. ")
    (begun,) = says(template, "It is 8", end=False)
    rollout, engine = await play([begun, *says(template, "7")], template=template, stepper=stepper)
    assert rollout.earlier == () and engine.asked[1].ids[: len(engine.asked[0].ids)] == engine.asked[0].ids
    assert template.tokens.decode(rollout.ledger.ids).endswith("It is 8\nWait, that is wrong. 7<|im_end|>")


async def test_what_a_plug_in_passes_on_with_a_tools_answer_reaches_the_reward_too() -> None:
    class Adds(ToolsAndFeedback):
        async def step(self, turn: Turn) -> Step:
            step = await super().step(turn)
            return replace(step, info={**step.info, "level": 3})

    turns = says(template_for(HERMES), calling(("add", {"a": 1, "b": 1})), "2")
    rollout, _ = await play(turns, stepper=Adds())
    assert rollout.infos == {"level": 3}
    assert rollout.ledger.entries[2].info["tools"][0]["name"] == "add"


async def test_of_each_cause_of_drift_the_first_is_shown_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    template = template_for(HERMES)
    tight = '<tool_call>\n{"name":"add","arguments":{"a": 1, "b": 1}}\n</tool_call>'
    said = iter(says(template, tight, "2") * 3)
    engine = ScriptedEngine(lambda ids, sampling, key: next(said))
    async with gateway() as opened, engine:
        player = Player(engine, template, opened)
        rollouts = [await player.play(PLAIN, group="g", index=index) for index in range(3)]
    assert [rollout.infos["drift"] for rollout in rollouts] == [{"whitespace": 1}] * 3
    (shown,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert '{"name": "add"' in shown and '{"name":"add"' in shown


def turns_of(sampling: Iterable[Sampling]) -> list[int]:
    return [one.max_tokens for one in sampling]


async def test_a_turn_is_never_given_more_room_than_the_rollout_has_left() -> None:
    template = template_for(HERMES)
    turns = says(template, calling(("add", {"a": 1, "b": 1})), "2")
    rollout, engine = await play(turns, template=template, limits=RolloutLimits(rollout_tokens=2000, turn_tokens=1990))
    room = turns_of(asked.sampling for asked in engine.asked)
    assert room[1] == 2000 - len(engine.asked[1].ids) and rollout.stop is StopReason.DONE
