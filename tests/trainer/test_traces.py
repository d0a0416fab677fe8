"""Traces for SFT: formats of rows, what is refused with its row, and ledgers equal to those of recorded rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from gateway.types import Task as SessionTask
from gateway.types import ToolSpec
from tests.trainer.conversations import TOOL, calling_turn, make_calls, make_template, text_turn, tool_replies
from tests.trainer.policy_scripts import HERMES, make_gateway, render_calls, script_by_task
from tests.trainer.tokenizer_families import FAMILIES, Family
from trainer.data.row_media import RowMedia
from trainer.data.traces import RunTraces, TraceOptions, TraceTask, parse_where, read_trace
from trainer.engine.scripted import ScriptedEngine
from trainer.parse.choose import load_parser
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import ColumnSettings, RolloutLimits
from trainer.rollout.task import Task
from trainer.rollout.trace_player import TraceGateway, encode_trace, play_trace
from trainer.storage.rollout_file import RolloutWriter
from trainer.template import Template

CALL = {"name": "look_up", "arguments": {"word": "gnu"}}
QUESTION = {"role": "user", "content": "What is a gnu?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "an animal"}
SPEC = ToolSpec("look_up", TOOL["function"]["description"], TOOL["function"]["parameters"])
ROWS: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [
            QUESTION,
            CALLING,
            RESULT,
            {"role": "assistant", "content": "#### animal"},
        ],
        "tools": [TOOL],
    },
    "arguments as text": {
        "messages": [
            QUESTION,
            {"role": "assistant", "tool_calls": [{"id": "x", "function": CALL | {"arguments": '{"word": "gnu"}'}}]},
            {"role": "tool", "tool_call_id": "x", "content": "an animal"},
            {"role": "assistant", "content": "#### animal"},
        ],
        "tools": json.dumps([TOOL]),
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "What is a gnu?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "an animal"},
            {"from": "gpt", "value": "#### animal"},
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
}


def read(row: dict[str, Any]) -> TraceTask:
    return read_trace(row, "rows.jsonl:7", RowMedia(ColumnSettings(), Path()))


def make_runner(template: Template, **limits: Any) -> RolloutRunner:
    gateway: Any = TraceGateway((SPEC,))
    return RolloutRunner(ScriptedEngine({}), template, gateway, RolloutLimits(**limits))


def hermes() -> Template:
    return make_template(HERMES, parser=load_parser("hermes", {"look_up": SPEC.parameters}))


@pytest.mark.parametrize("form", ROWS)
async def test_each_format_gives_the_same_ledger(form: str) -> None:
    rollout = await play_trace(make_runner(hermes()), read(ROWS[form]))
    first = await play_trace(make_runner(hermes()), read(ROWS["messages"]))
    assert rollout.ledger.ids == first.ledger.ids and rollout.ledger.mask == first.ledger.mask
    text = hermes().tokenizer.decode(
        [id for id, own in zip(rollout.ledger.ids, rollout.ledger.mask, strict=True) if own]
    )
    assert text.count("<|im_end|>") == 2 and "gnu" in text and "an animal" not in text


def test_calls_of_one_turn_may_come_in_parts_and_their_results_as_one() -> None:
    call = {"from": "function_call", "value": json.dumps(CALL)}
    both, said = {"from": "observation", "value": "two animals"}, {"from": "gpt", "value": "#### animal"}
    asked = {"from": "human", "value": "What are gnus?"}
    no_arguments = {"name": "look_up", "parameters": {"type": "object", "properties": None}}
    for parts in ([call, call], [{"from": "gpt", "value": "I look."}, call, call]):
        task = read({"conversations": [asked, *parts, both, said], "tools": [no_arguments]})
        assert [len(turn.get("tool_calls", ())) for turn in task.turns] == [2, 0]
        assert task.turns[0]["content"] == parts[0]["value"] * (len(parts) == 3)


async def test_prompt_and_completion_are_a_trace() -> None:
    rollout = await play_trace(make_runner(hermes()), read({"prompt": "Say hi", "completion": "hi"}))
    assert [hermes().decode_turn(turn.ids) for turn in rollout.turns] == ["hi"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
async def test_trace_of_a_recorded_rollout_has_its_ids_and_mask(family: Family) -> None:
    template = make_template(family, parser=load_parser(family.parser, {"look_up": SPEC.parameters}))
    calls = make_calls("gnu")
    turns = [calling_turn(calls), text_turn("It is an animal.")]
    task = TraceTask("one", (QUESTION,), rest=(turns[0], *tool_replies(calls, "an animal"), turns[1]), tools=(SPEC,))
    played = await play_trace(make_runner(template), task)
    task, _, _, sampled = encode_trace(task, template, ())
    turns = list(task.turns)
    assert [turn.ids for turn in played.turns] == sampled
    assert all(sum(id in template.stop_ids for id in ids) == 1 and ids[-1] in template.stop_ids for ids in sampled)
    prompt = template.encode_prompt((QUESTION,), (SPEC,))
    tail = template.encode_tail(task.rest[1:2], ended=True, calls=turns[0]["tool_calls"])
    assert played.ledger.ids == prompt + sampled[0] + tail + sampled[1]


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtracts."""
    return a - b


async def record(
    folder: Path, *, examples: bool = False, tools: tuple[str, ...] | None = None
) -> tuple[Rollout, RolloutRunner]:
    """A rollout of a scripted policy, in a run's folder."""
    gateway = make_gateway(add, subtract)
    shown = (QUESTION, text_turn("#### animal")) if examples else ()
    chat = ({"role": "system", "content": "Be brief."}, *shown, {"role": "user", "content": "Add 1 and 2"})
    task = Task("one", chat, session_task=SessionTask(tools=tools))
    async with gateway:
        template = make_template(HERMES, parser=load_parser("hermes", {}))
        script = script_by_task({"one": (render_calls(("add", {"a": 1, "b": 2})), "#### 3")}, template)
        runner = RolloutRunner(ScriptedEngine(script), template, gateway)
        rollout = await runner.run(task, group="1-0-0")
    with RolloutWriter(folder) as writer:
        writer.add(rollout)
    return rollout, runner


@pytest.mark.parametrize("tools", [None, ("add",)])
async def test_trace_of_a_run_has_its_ids_and_the_tools_that_its_row_named(
    tools: tuple[str, ...] | None, tmp_path: Path
) -> None:
    rollout, runner = await record(tmp_path, tools=tools)
    (task,) = RunTraces(tmp_path, TraceOptions())
    assert isinstance(task, TraceTask)
    played = await play_trace(runner, task)
    assert played.ledger.ids == rollout.ledger.ids and played.ledger.mask == rollout.ledger.mask
    assert ("Subtracts." in runner.template.tokenizer.decode(played.ledger.ids)) == (tools is None)


async def test_examples_and_system_prompt_are_left_out_of_what_is_learned(tmp_path: Path) -> None:
    rollout, runner = await record(tmp_path, examples=True)
    (task,) = RunTraces(tmp_path, TraceOptions(system="Use tools.", drop_examples=True))
    assert isinstance(task, TraceTask)
    assert task.messages == ({"role": "system", "content": "Use tools."}, {"role": "user", "content": "Add 1 and 2"})
    played = await play_trace(runner, task)
    assert [turn.ids for turn in played.turns] == [turn.ids for turn in rollout.turns]


async def test_turn_of_weight_zero_is_read_and_not_learned() -> None:
    row = {"messages": [QUESTION, text_turn("I guess.") | {"weight": 0}, QUESTION, text_turn("#### animal")]}
    rollout = await play_trace(make_runner(hermes()), read(row))
    assert [bool(turn.info) for turn in rollout.turns] == [True, False]
    assert rollout.turns[0].info["left_out"] == [[0, len(rollout.turns[0].ids)]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [QUESTION]}, "messages: has no turn of the assistant"),
        ({"messages": [text_turn("hi")]}, "has nothing before the assistant's first turn"),
        ({"messages": [QUESTION, {"role": "assistant", "reasoning_content": "hm"}]}, "messages[1]: is only reasoning"),
        ({"messages": [QUESTION, text_turn("")]}, "messages[1]: is empty"),
        ({"messages": [QUESTION, text_turn("x") | {"weight": 0}]}, "no turn of the assistant with a weight"),
        ({"messages": [QUESTION, text_turn("x") | {"weight": 2}]}, "messages[1].weight: is 2"),
        ({"messages": [{"role": "robot", "content": "x"}, text_turn("x")]}, "messages[0].role: is 'robot'"),
        ({"prompt": 3, "completion": "x"}, "prompt: is no list of messages"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "conversations[0]: is no turn of ShareGPT"),
        ({"messages": [QUESTION, text_turn("x")], "tools": [{}]}, "tools: are no schemas of tools"),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "function.name: is missing",
        ),
        ({"text": "x"}, "messages: is missing"),
        *(
            ({"messages": [QUESTION, text_turn("x")], "tools": tools}, "tools: are no schemas of tools")
            for tools in (
                5,
                True,
                [TOOL, "x"],
                [{"function": "calculate"}],
                [{"function": None}],
                [{"name": 5}],
                [{"name": "a", "parameters": "x"}],
                [{"name": "a", "parameters": {"properties": []}}],
            )
        ),
        ({"messages": [QUESTION, text_turn("x")], "tools": [TOOL, TOOL]}, "tools: has two tools named 'look_up'"),
        ({"messages": [QUESTION, text_turn("x") | {"tool_calls": 5}]}, "messages[1].tool_calls: is no list of calls"),
        *(
            (
                {"messages": [QUESTION, text_turn("") | {"tool_calls": [{"function": function}]}]},
                "function.name: is missing",
            )
            for function in ("calculate", None)
        ),
        ({"messages": [QUESTION, text_turn("x") | {"content": ["hi"]}]}, "messages[1].content: is neither a text nor"),
        (
            {"messages": [QUESTION, text_turn("a"), text_turn("b")]},
            "messages[2]: follows another turn of the assistant",
        ),
        ({"messages": [QUESTION, CALLING, text_turn("b")]}, "messages[2]: follows another turn of the assistant"),
    ],
)
def test_row_that_cannot_be_learned_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(row)
    assert "rows.jsonl:7" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (text_turn('<tool_call>\n{"name": "look_up", "arguments": {"word": "gnu"}}\n</tool_call>'), "has the calls []"),
        (text_turn("<tool_call>\n{oops\n</tool_call>"), "is not read back as calls"),
        (text_turn("<think>\nhm\n</think>\n\n"), "is only reasoning"),
    ],
)
async def test_turn_that_the_parser_reads_otherwise_is_named(turn: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await play_trace(make_runner(hermes()), read({"messages": [QUESTION, turn], "tools": [TOOL]}))
    assert "rows.jsonl:7: messages[1]" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("row", [ROWS["messages"], {"messages": [QUESTION, text_turn("gnu " * 30)]}])
async def test_trace_that_is_too_long_is_named_whichever_turn_makes_it_so(row: dict[str, Any]) -> None:
    whole = len((await play_trace(make_runner(hermes()), read(row))).ledger)
    await play_trace(make_runner(hermes(), rollout_tokens=whole), read(row))
    with pytest.raises(ConfigError, match=rf"rows.jsonl:7: messages: has {whole} tokens, and `limits.rollout_tokens`"):
        encode_trace(read(row), hermes(), (SPEC,), whole - 1)


async def test_parts_of_text_are_one_text() -> None:
    def text(content: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": content}]

    parts = {"messages": [{"role": "user", "content": text("Say hi")}, {"role": "assistant", "content": text("hi")}]}
    first, second = [
        await play_trace(make_runner(hermes()), read(row))
        for row in (parts, {"prompt": "Say hi", "completion": "hi"})
    ]  # fmt: skip
    assert first.ledger.ids == second.ledger.ids


async def test_conditions_choose_rollouts(tmp_path: Path) -> None:
    rollout, _ = await record(tmp_path)
    for text, holds in {
        "": True, "turns = 2": True, "calls > 0 and turns<=2": True, "calls > 1": False, "step == 1": True,
        "stop == done": True, "task != 'one'": False, "reward >= 1": False, "accuracy > 0": False, "invalid == 0": True,
    }.items():  # fmt: skip
        assert all(each.holds(rollout) for each in parse_where(text)) is holds, text
    assert [each.holds(replace(rollout, task="1")) for each in parse_where("task == 1")] == [True]
    for text, problem in {
        "reward is good": "is no condition", "reward >= 0,5": "compared with '0,5', which is no number",
        "Reward >= 0": "rollouts have no 'Reward'.*did you mean 'reward'", "outcmoe == 1": "rollouts have no 'outcmoe'",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"(?s){problem}"):
            RunTraces(tmp_path, TraceOptions(text))
    with pytest.raises(ConfigError, match="has no rollout where calls > 1"):
        RunTraces(tmp_path, TraceOptions("calls > 1"))
