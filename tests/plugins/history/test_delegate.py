"""Sub-agents: chats of the policy within a rollout, trained with it, under its limits and in its session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import ConfigError
from gateway.types import Text, ToolResult
from mtrl_plugins.history.compaction import Compaction
from mtrl_plugins.history.delegate import DelegatePlayer
from mtrl_plugins.history.delegate_settings import DelegateSettings
from mtrl_plugins.history.settings import HistorySettings
from mtrl_plugins.trl.reward_functions import reward_arguments
from mtrl_plugins.trl.reward_functions import reward_arguments as trl_arguments
from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_job import make_worker_job
from mtrl_plugins.workers.worker_pool import WorkerPool
from tests.plugins.history.long_chats import (
    FAMILY_TASK,
    REQUEST,
    TEMPLATE,
    delegate,
    play_family,
    read,
    sampled_turns,
    texts,
    write_turns,
)
from tests.plugins.workers.pools import write_tools
from tests.trainer.policy_scripts import encode_turns, make_gateway, make_tasks, render_calls
from tests.trainer.vision.vision_models import picture, seeing_model
from trainer.data.traces import RunTraces, TraceOptions
from trainer.engine.base import Engine, EngineError, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author, Ledger
from trainer.replay_rollouts import RecordedPolicy
from trainer.reward.attempt import Attempt, own_ledgers
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits, RolloutSettings
from trainer.rollout.steppers import ToolsAndFeedback, find_failed_tools
from trainer.rollout.task import Task
from trainer.rollout.trace_player import play_trace
from trainer.setup import load_template, make_stepper
from trainer.setup import make_gateway as make_job_gateway
from trainer.storage.rollout_file import RolloutWriter
from trainer.template import Template
from trainer.train.settings import TrainSettings
from trainer.view.branches import name_branches

PAGE = render_calls(("read", {"page": 3, "words": 5}))
"""A turn whose tool rewards it with 3."""


async def test_answer_of_a_sub_agent_is_the_tools_result_and_its_chat_a_ledger_of_the_rollout() -> None:
    rollout, engine = await play_family([delegate("Read page 3."), "It is 3."], {1: [PAGE, "Page 3 it was."]})
    assert (rollout.stop, rollout.reason, len(rollout.ledgers)) == (StopReason.DONE, "", 2)
    child, parent = texts(rollout, 0), texts(rollout, 1)
    assert [author for author, _ in child] == ["task", "policy", "tool", "policy"]
    assert "You are a sub-agent." in child[0][1] and "Read page 3." in child[0][1] and "Find it out" not in child[0][1]
    assert "Page 3 it was." in parent[2][1] and "page 3:" not in parent[2][1]
    assert '"name": "delegate"' in parent[0][1] and '"name": "delegate"' not in child[0][1]
    assert rollout.rewards == {"call": 3.0}, "its tools are those of the rollout's session"
    assert name_branches(rollout) == ("sub-agent 1", "the task's chat")
    written = sum(len(turn.ids) for turn in rollout.ledgers[0].turns)
    assert rollout.infos == {"delegate": {"calls": 1, "tokens": written}}
    assert [request.key for request in engine.requests] == ["g/t/0", *["g/t/sub-agent-1/0"] * 2, "g/t/0"]
    attempt = Attempt(FAMILY_TASK, rollout, decoder=TEMPLATE)  # type: ignore[arg-type]
    assert attempt.answer == "It is 3." and attempt.response.count("Page 3 it was.") == 1
    seen = trl_arguments([attempt], ())
    assert seen["prompts"] == [[*map(dict, FAMILY_TASK.messages)]]
    assert [message["role"] for message in seen["completions"][0]] == ["assistant", "tool", "assistant"]
    assert seen["completions"][0][-1]["content"] == "It is 3."


Turn = st.sampled_from(["p", "d", "dd", "dp", "bad", "self"])
TEXTS = {
    "p": PAGE,
    "d": delegate("One."),
    "dd": delegate("One.", "Two."),
    "dp": delegate("One.") + "\n" + PAGE,
    "bad": render_calls(("delegate", {"task": 7})) + '\n<tool_call>\n{"name": "delegate", "arguments": {"task": "\\ud8',
    "self": delegate("\ud800 <|im_end|>"),
}


@given(
    parent=st.lists(Turn, max_size=4),
    children=st.lists(st.lists(Turn, max_size=3), max_size=4),
    limits=st.fixed_dictionaries({"rollout_tokens": st.integers(300, 4000), "turn_tokens": st.integers(20, 200)}),
    settings=st.fixed_dictionaries({"times": st.integers(1, 4), "turns": st.integers(1, 4)}),
    history=st.booleans(),
)
@hypothesis(max_examples=60, deadline=None)
def test_each_sampled_id_is_trained_once_behind_the_ids_that_the_engine_read(
    parent: list[str], children: list[list[str]], limits: dict[str, int], settings: dict[str, int], history: bool
) -> None:
    turns = [TEXTS[name] for name in parent]
    others = {number + 1: [TEXTS[name] for name in names] for number, names in enumerate(children)}
    stepper: Any = Compaction(HistorySettings(kind="window", at=0.3), ToolsAndFeedback()) if history else None
    play = partial(play_family, stepper=stepper, limits=limits, **settings)
    rollout, engine = anyio.run(lambda: play(turns, others))
    assert not rollout.stop.is_infrastructure, rollout.reason
    expected = sorted((request.ids, len(request.ids)) for request in engine.requests)
    assert sorted((before, len(before)) for before, _ in sampled_turns(rollout)) == expected
    for ledger in rollout.ledgers:
        assert sum(ledger.mask) == sum(len(turn.ids) for turn in ledger.turns)
    attempt = Attempt(FAMILY_TASK, rollout, decoder=TEMPLATE)  # type: ignore[arg-type]
    written = sum(len(turn.ids) for ledger in own_ledgers(rollout) for turn in ledger.turns)
    assert sum(attempt.response_ids[1]) == written
    assert rollout.infos["delegate"].get("calls", 0) <= settings["times"]
    outside = rollout.infos["delegate"].get("tokens", 0)
    assert outside <= limits["rollout_tokens"], "what sub-agents write counts for the rollout's limit"
    again, _ = anyio.run(lambda: play((), {}, engine=RecordedPolicy(rollout)))
    assert [ledger.ids for ledger in again.ledgers] == [ledger.ids for ledger in rollout.ledgers]


@pytest.mark.parametrize("in_order", [False, True])
async def test_sub_agents_of_one_turn_play_at_once_or_for_a_tape_in_order(in_order: bool) -> None:
    arrived: list[str] = []
    are_both_there = anyio.Event()

    async def meet(name: str) -> str:
        """Waits for the other."""
        arrived.append(name)
        if len(arrived) == 3 or in_order:
            are_both_there.set()
        await are_both_there.wait()
        return name

    meets = {number: [render_calls(("meet", {"name": f"{number}"})), f"I am {number}."] for number in (1, 2)}
    turn = delegate("One.") + "\n" + render_calls(("meet", {"name": "0"})) + "\n" + delegate("Two.")
    rollout, _ = await play_family([turn, "done"], meets, meet, in_order=in_order)
    assert rollout.stop is StopReason.DONE and sorted(arrived) == ["0", "1", "2"]
    assert not in_order or arrived == ["0", "1", "2"], "the turn's other calls are made first"
    answers = [str(message["content"]) for message in rollout.ledger.entries[2].messages]
    assert [answer.strip() for answer in answers] == ["I am 1.", "0", "I am 2."]
    assert name_branches(rollout)[:2] == ("sub-agent 1", "sub-agent 2")


async def test_failed_infrastructure_of_a_sub_agent_is_the_rollouts_and_never_a_zero() -> None:
    turns: Mapping[int, Any] = {1: [PAGE, EngineError("the server is gone")]}
    rollout, _ = await play_family([delegate("One.")], turns)
    assert rollout.stop is StopReason.TOOL_FAILED and not rollout.rewards
    assert "sub-agent-1: engine_failed: the server is gone" in rollout.reason
    assert find_failed_tools(rollout) == ["delegate"], "another rollout takes its place if it delegates, too"
    assert len(rollout.ledgers[0].turns) == 1, "what it wrote is kept"


async def test_drift_of_a_sub_agents_chat_is_the_rollouts() -> None:
    spaced = PAGE.replace(": ", ":   ")
    rollout, _ = await play_family([delegate("One.")], {1: [spaced, "Page 3."]})
    assert rollout.stop is StopReason.DONE and sum(rollout.infos["drift"].values()) == 1


async def test_lost_sub_agent_ends_those_beside_it() -> None:
    engine = ScriptedEngine(write_turns([f"{delegate('One.')}\n{delegate('Two.')}"], {1: [EngineError("gone")]}))
    engine.hold("g/t/sub-agent-2/0")
    rollout, _ = await play_family((), {}, engine=engine)
    assert rollout.stop is StopReason.TOOL_FAILED and engine.cancelled == 1 and not rollout.rewards


async def test_limit_of_calls_holds_for_a_rollout_with_its_sub_agents() -> None:
    rollout, _ = await play_family([delegate("One.")] * 3, {1: [PAGE] * 9, 2: [PAGE] * 9}, limits={"tool_calls": 3})
    results = [outcome for turn in rollout.ledgers for entry in turn for outcome in entry.outcomes]
    assert len(results) <= 3, "two delegations, or one with two calls of its own"


def test_credit_that_needs_turns_in_the_order_of_time_is_refused() -> None:
    for kind in ("discounted", "scores", "turns"):
        with pytest.raises(ValueError, match=rf"`delegate` does not go with `algorithm.credit.kind: {kind}`"):
            TrainSettings.model_validate(
                {"model": "m", "data": "d", "delegate": {}, "algorithm": {"credit": {"kind": kind}}}
            )


async def test_deadline_of_the_rollout_holds_for_its_sub_agents() -> None:
    engine = ScriptedEngine(write_turns([delegate("One.")], {}))
    engine.hold("g/t/sub-agent-1/0")
    rollout, _ = await play_family((), {}, engine=engine, limits={"timeout_s": 0.3})
    assert rollout.stop is StopReason.WALL_TIME and not rollout.rewards and engine.cancelled == 1


async def test_tokens_of_sub_agents_count_for_the_rollouts_limit() -> None:
    words = "word " * 80
    turns, children = [delegate(f"{number}") for number in range(9)], {number: [words] for number in range(1, 9)}
    rollout, _ = await play_family(turns, children, limits={"rollout_tokens": 1500})
    assert rollout.stop is StopReason.LENGTH_ROLLOUT
    written = sum(len(turn.ids) for ledger in rollout.earlier for turn in ledger.turns)
    assert written > 0 and len(rollout.ledger) + written <= 1500
    assert rollout.infos["delegate"]["tokens"] == written


async def test_sub_agent_that_does_not_finish_says_so_and_what_cannot_be_delegated_is_an_error() -> None:
    rollout, _ = await play_family(
        [delegate("One."), delegate("Two."), render_calls(("delegate", {"text": "x"})), "done"],
        {1: ["Let me read.\n" + PAGE] * 5},
        turns=2,
        times=1,
    )
    answers = [str(entry.messages[0]["content"]) for entry in rollout.ledger if entry.author is Author.TOOL]
    assert "stopped before it was done" in answers[0] and "Let me read." in answers[0]
    assert "no further sub-agent: there were 1" in answers[1] and "`task` must be a text" in answers[2]
    assert [one for entry in rollout.ledger for one in entry.outcomes] == ["error", "error", "invalid"]
    assert rollout.stop is StopReason.DONE and rollout.infos["delegate"]["unfinished"] == 1


async def test_sub_agent_has_the_tools_that_it_may_use_and_no_sub_agents() -> None:
    async def secret() -> str:
        """Tells it."""
        return "42"

    both = render_calls(("secret", {}), ("delegate", {"task": "Again."}))
    rollout, _ = await play_family([delegate("One."), both, "x"], {1: [both]}, read, secret, tools=("read",))
    (child, *_), parent = rollout.ledgers, rollout.ledger
    assert [list(entry.outcomes) for entry in child if entry.outcomes] == [["invalid", "invalid"]]
    assert "no tool named" in str(child.messages) and "Available tools: read." in str(child.messages)
    assert [list(entry.outcomes) for entry in parent if entry.outcomes] == [["ok"], ["ok", "ok"]]


def summarise(parent: Sequence[str], children: Mapping[int, Sequence[str]], at: float = 0.5) -> Mapping[str, Any]:
    """How a family plays that summarises when it is asked to."""
    inner = write_turns(parent, children)

    def write(ids: Sequence[int], sampling: Any, key: str) -> Any:
        is_asked = REQUEST in TEMPLATE.tokenizer.decode(ids)[-120:]
        return encode_turns(TEMPLATE, "So far. " * 8)[0] if is_asked else inner(ids, sampling, key)

    history: Any = Compaction(HistorySettings(request=REQUEST, at=at), ToolsAndFeedback())
    return {"engine": ScriptedEngine(write), "stepper": history}


async def test_sub_agent_shortens_its_own_chat_which_counts_for_the_rollout() -> None:
    pages = [render_calls(("read", {"page": page, "words": 60})) for page in range(8)]
    rollout, _ = await play_family((), {}, **summarise([delegate("All.")], {1: pages}), tokens=700, turns=20)
    assert rollout.stop is StopReason.DONE, rollout.reason
    assert name_branches(rollout)[:2] == ("sub-agent 1", "after summary 1") and len(rollout.ledgers) > 2
    summaries = sum("after summary" in name for name in name_branches(rollout))
    assert rollout.infos["history"]["summaries"] == summaries


async def test_summaries_of_a_sub_agent_are_within_its_share_of_tokens() -> None:
    pages = [render_calls(("read", {"page": page, "words": 150})) for page in range(60)]
    limits = {"rollout_tokens": 1100, "turn_tokens": 90, "assistant_turns": 60}
    play = summarise([delegate("All.")], {1: pages})
    rollout, _ = await play_family((), {}, **play, limits=limits, tokens=900, turns=60)
    share = limits["rollout_tokens"] - sum(len(entry.ids) for entry in rollout.ledgers[0].entries[:2]) - 2 * 90
    assert rollout.infos["history"]["summaries"] > 2
    assert rollout.infos["delegate"]["tokens"] == share, "it ends when its share is used up"


async def test_chat_is_shortened_by_what_sub_agents_left_of_the_rollouts_tokens() -> None:
    pages = [render_calls(("read", {"page": page, "words": 60})) for page in range(20)]
    play = summarise([*pages[:3], delegate("All."), "word " * 15 + pages[3]], {1: pages}, at=0.9)
    limits = {"rollout_tokens": 1500, "turn_tokens": 120}
    rollout, _ = await play_family((), {}, **play, limits=limits, turns=20)
    assert rollout.stop is StopReason.DONE, rollout.reason
    assert rollout.infos["history"]["summaries"] > 0


@pytest.mark.parametrize("restricted", [{"tools": ("read",)}, {"named": ("read",)}], ids=["by setting", "by row"])
async def test_traces_of_a_family_offer_the_tools_that_each_chat_had(restricted: Any, tmp_path: Path) -> None:
    async def secret() -> str:
        """Tells it."""
        return "42"

    rollout, _ = await play_family([delegate("One."), PAGE], {1: [PAGE]}, read, secret, **restricted)
    with RolloutWriter(tmp_path) as writer:
        writer.add(rollout)
    async with make_gateway(read, secret) as gateway:
        runner = RolloutRunner(ScriptedEngine(write_turns((), {})), TEMPLATE, gateway)
        traces: Any = RunTraces(tmp_path, TraceOptions())
        played = [await play_trace(runner, trace) for trace in traces]
    assert [each.ledger.ids for each in played] == [each.ids for each in rollout.ledgers]


def read_settings(**values: Any) -> RolloutSettings:
    return RolloutSettings.model_validate({"model": "m", "data": "d", "out": Path("o"), **values})


async def test_section_is_checked_described_and_counted() -> None:
    with pytest.raises(ValidationError, match="an agent has sub-agents of its own"):
        read_settings(delegate={}, agent={"command": ["x"]})
    settings = read_settings(delegate={"tools": ["read", "wrote"]}, history="window", record=True)
    part = DelegateSettings.of(settings)
    assert part is not None and "up to 8 sub-agents" in part.describe()
    player = part.make_player(settings)
    assert isinstance(player, DelegatePlayer) and player.in_order and isinstance(player.stepper, Compaction)
    async with make_gateway(read) as gateway:
        with pytest.raises(ConfigError, match="no tool 'wrote'"):
            await part.try_out(gateway, settings)
    infos: list[dict[str, Any]] = [{"delegate": {"calls": 2, "tokens": 30, "unfinished": 1}}, {"delegate": {}}, {}]
    rollouts = [Rollout("t", Ledger(), StopReason.DONE, infos=info) for info in infos]
    expected = {"delegate/calls": 1.0, "delegate/tokens": 15.0, "delegate/unfinished": 0.5}
    assert part.compute_metrics(rollouts) == expected and part.compute_metrics(rollouts[2:]) == {}


PICTURE = picture(3)
LIMITS = {"assistant_turns": 30, "rollout_tokens": 1500, "turn_tokens": 90}


class Policy:
    """Gives the task to a sub-agent, then calls a tool so many times; the sub-agent calls it as often."""

    def __init__(self, template: Template, call: str, count: int = 6) -> None:
        self.template, self.call, self.count = template, call, count
        self.turns: Counter[bool] = Counter()

    def __call__(self, ids: Sequence[int], sampling: Sampling | None = None, key: str = "") -> Answer:
        text = self.template.tokenizer.decode(tuple(ids))
        asked = text.rpartition("<|im_start|>user")[2]
        if REQUEST in asked and "assistant" in asked[-30:]:
            return encode_turns(self.template, "So far.")[0]
        is_child = "You are a sub-agent" in text
        self.turns[is_child] += 1
        number = self.turns[is_child]
        turns = [delegate("Look.")] * (not is_child) + [self.call] * self.count
        return encode_turns(self.template, turns[number - 1] if number <= len(turns) else "Seen.")[0]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("sees"))


@pytest.mark.parametrize("kind", ["summarise", "window"])
async def test_images_stay_with_the_ids_that_stand_for_them(seeing: Path, kind: str) -> None:
    async def look() -> ToolResult:
        """Shows a picture."""
        return ToolResult((Text("Here: " + "word " * 30), picture(1), Text("seen.")))

    template = Template.load(seeing)
    assert template.image_processor is not None
    history: Any = Compaction(HistorySettings(kind=kind, at=0.25, request=REQUEST), ToolsAndFeedback())
    player = DelegatePlayer(DelegateSettings(turns=20), history, in_order=False)
    content = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is it?"}]
    task = Task("t", ({"role": "user", "content": content},))
    limits = RolloutLimits.model_validate(LIMITS | {"rollout_tokens": 2400})
    engine = ScriptedEngine(Policy(template, render_calls(("look", {}))))
    with anyio.fail_after(60):
        async with make_gateway(look) as gateway, engine:
            runner = player.wrap(RolloutRunner(engine, template, gateway, limits, stepper=history))
            rollout = await runner.run(task, group="g")
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) > 3, rollout.reason
    image_id = template.image_processor.family.image_id
    for request in engine.requests:
        assert len(request.images) == request.ids.count(image_id)
    prompts = {request.ids: request.images for request in engine.requests}
    for ledger in rollout.ledgers:
        for start, entry in zip(ledger.starts, ledger, strict=True):
            if entry.author is Author.POLICY:
                shown = tuple(span.medium for span in ledger.media_spans if span.start < start)
                assert prompts[ledger.ids[:start]] == shown
        assert len(ledger.expanded) > len(ledger) or not ledger.images
    assert rollout.ledger.images[0] == PICTURE, "the task's image begins each of its chats"
    arguments = reward_arguments([Attempt(task, rollout, decoder=template)], ())
    (prompt,), (completion,) = arguments["prompts"], arguments["completions"]
    answers = [part for message in completion if message["role"] == "tool" for part in message["content"]]
    assert prompt[0]["content"][0]["image"].size == (16, 16)
    assert sum("image" in part for part in answers if isinstance(part, dict)) == 6, "those of its own chats"


def make_settings(folder: Path) -> BaseRolloutSettings:
    history = {"kind": "summarise", "at": 0.5, "request": REQUEST}
    values = {
        "tools": str(folder / "tools"),
        "limits": LIMITS,
        "seed": 3,
        "history": history,
        "delegate": {"turns": 20},
    }
    return BaseRolloutSettings.model_validate(values)


SAFE = render_calls(("safe", {"text": "word " * 12}))


def make_runner(settings: BaseRolloutSettings, folder: Path, engine: Engine) -> RolloutRunner:
    template, gateway = load_template(folder / "model", settings.template), make_job_gateway(settings)
    return RolloutRunner(engine, template, gateway, settings.limits, stepper=make_stepper(settings), seed=settings.seed)


async def play_here(settings: BaseRolloutSettings, folder: Path, engine: Engine) -> Rollout:
    """Plays the rollout as a run of one process does."""
    runner, part = make_runner(settings, folder, engine), DelegateSettings.of(settings)
    assert part is not None
    with anyio.fail_after(60):
        async with runner.gateway:
            return await part.make_player(settings).wrap(runner).run(make_tasks("t")[0], group="g")


def without_times(rollout: Rollout) -> list[Any]:
    return [[replace(entry, info={}, cached_tokens=0) for entry in ledger] for ledger in rollout.ledgers]


async def test_worker_plays_them_as_this_process_does(tmp_path: Path) -> None:
    folder = write_tools(tmp_path / "job")
    settings = make_settings(folder)
    template = load_template(folder / "model", settings.template)
    expected = await play_here(settings, folder, ScriptedEngine(Policy(template, SAFE)))
    engine = ScriptedEngine(Policy(template, SAFE))
    job = make_worker_job(settings, folder / "model", template, engine, 60.0)
    with anyio.fail_after(150):
        async with WorkerPool(WorkerSettings(workers=1), job, engine, folder, print) as pool:
            runner = pool.wrap(make_runner(settings, folder, engine))
            rollout = await runner.run(make_tasks("t")[0], group="g")
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) > 3, rollout.reason
    assert without_times(rollout) == without_times(expected) and rollout.infos == expected.infos
    assert [span.phase for span in rollout.timeline] == [span.phase for span in expected.timeline]
