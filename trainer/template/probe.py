"""Probes a chat template before a run: tries on small rollouts everything that training relies on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gateway.types import ToolCall, ToolSpec
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.template.chat_template import MARK, build_call
from trainer.template.drift import Cause, find_drifts, parse_arguments
from trainer.template.errors import OTHER_TEMPLATE, TemplateError
from trainer.template.render_reply import render_reply
from trainer.template.template import NO_CALLS, Template
from trainer.template.tokenizer import strip_fences

_TOOL = ToolSpec(
    "look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
)
_TASK: tuple[Message, ...] = (
    {"role": "system", "content": "You answer."},
    {"role": "user", "content": "What is a gnu?"},
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. One that is not ok stops the run; one that is ok may have a detail worth knowing."""

    check: str
    is_ok: bool
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"{'ok' if self.is_ok else 'FAILED'}: {self.check}" + (f": {self.detail}" if self.detail else "")]
        return "\n  remedy: ".join([*lines, self.remedy] if self.remedy else lines)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The findings of all checks."""

    findings: tuple[Finding, ...]
    cure: str = ""
    """A setting with which all checks pass, if one was found."""

    @property
    def is_ok(self) -> bool:
        return all(finding.is_ok for finding in self.findings)

    def raise_if_failed(self) -> None:
        """Raises one TemplateError with all problems."""
        failed = [finding for finding in self.findings if not finding.is_ok]
        if failed:
            problems = dict.fromkeys(finding.detail for finding in failed)
            remedies = [f"set {self.cure}"] if self.cure else dict.fromkeys(finding.remedy for finding in failed)
            joint = "\n  " if any("\n" in problem for problem in problems) else "; "
            raise TemplateError(f"the chat template cannot be trusted: {joint.join(problems)}", "; ".join(remedies))


_IGNORE_SPACE = "set `template.sanity: ignore_strippable`, if white space does not matter"
_ROLLOUT_CHECK = "a rollout"


def probe(
    template: Template, *, tools: bool = True, feedback: bool = True, system: bool = True, max_calls: int | None = None
) -> ProbeReport:
    """Checks everything that rollouts rely on, and nothing that they do not use.

    `tools` if the policy calls any, `feedback` if users answer it, `system` if chats may have a system message,
    `max_calls` if the settings set how many calls of a turn are made.
    """
    if tools and not template.chat.writes_calls:  # All other checks of tools would fail for the same reason.
        findings = probe(template, tools=False, feedback=feedback, system=system).findings
        return ProbeReport((*findings, Finding("tools", False, NO_CALLS, template.calls_remedy)))
    task, used = _TASK if system else _TASK[1:], [_TOOL] if tools else []
    turns = [_text_turn("A bird."), *([_calling_turn(_make_calls(1))] if tools else [])]
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "the generation prompt": lambda: _check_generation_prompt(template),
        "the end of a turn": lambda: _check_end_of_turn(template, turns),
        "control tokens in an answer": lambda: _check_control_tokens(template, turns),
        "the time of day": lambda: _check_time(template, turns),
        "the system prompt": lambda: _check_system_prompt(template, system),
    }
    if system and not template.chat.takes_system:  # Each rollout would fail for the same reason.
        return ProbeReport(tuple(finding for name, check in checks.items() for finding in _run_check(name, check)))
    if tools:
        checks["tools"] = lambda: _check_tools(template, task)
        checks["the parser"] = lambda: _check_parser(template, task)
        checks["text before a call"] = lambda: _check_text_before_call(template, task)
        checks["several calls in a turn"] = lambda: _check_tool_turns(template, task, max_calls)
    if template.image_processor:
        checks["images"] = lambda: _check_images(template, tools)
    if not tools:
        checks[_ROLLOUT_CHECK] = lambda: _check_rollout(template, task, turns, [])
    if feedback:
        final = _text_turn("An antelope.")
        checks["a rollout with feedback"] = lambda: _check_rollout(template, task, [*turns, *turns, final], used)
    return ProbeReport(tuple(finding for name, check in checks.items() for finding in _run_check(name, check)))


def _run_check(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return [*check()] or [Finding(name, True)]
    except TemplateError as error:
        return [Finding(name, False, error.problem, error.remedy or OTHER_TEMPLATE)]


def _check_generation_prompt(template: Template) -> Iterator[Finding]:
    check = "the generation prompt"
    user: Message = {"role": "user", "content": "x"}
    prompt = strip_fences(template.chat.render([user], add_generation_prompt=True))
    with_turn = strip_fences(template.chat.render([user, _text_turn(MARK)]))
    turn_start = with_turn.partition(MARK)[0].removeprefix(prompt)
    if not template.chat.generation_prompt and template.tokenizer.find_last_special(turn_start):
        problem = f"the template adds none, though a turn begins with {turn_start!r}"
        yield Finding(check, False, problem, OTHER_TEMPLATE)
    if template.prefill:
        yield Finding(check, True, f"it begins the policy's turn with {template.prefill!r}")


def _check_end_of_turn(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    for turn in turns:
        end = template.chat.render_suffix(_make_answers(turn), template.stop_tokens).end
        closing = template.tokenizer.find_last_special(template.chat.render_closing(called="tool_calls" in turn))
        if end not in template.stop_tokens and closing not in template.stop_tokens:
            yield Finding(
                "the end of a turn",
                False,
                f"the template ends a turn with {end!r}, which would not stop the policy",
                "add its id to `eos_token_id` in the model's generation_config.json",
            )


def _check_tools(template: Template, task: Sequence[Message]) -> Iterator[Finding]:
    prompt = strip_fences(template.chat.render(task, [_TOOL], add_generation_prompt=True))
    reply: Message = {"role": "tool", "content": MARK, "name": "look_up", "tool_call_id": "call00000"}
    if "look_up" not in prompt:
        detail = "the template does not write the tools that it is given"
        yield Finding("tools", False, detail, template.calls_remedy)
    if MARK not in template.chat.render_suffix([reply], template.stop_tokens).rest:
        yield Finding("tools", False, "the template drops the tools' replies", template.calls_remedy)


def _check_images(template: Template, tools: bool) -> Iterator[Finding]:
    """Checks that each image of a user or a tool gets a placeholder."""
    content = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "."}]
    if template.count_images(template.encode_prompt([{"role": "user", "content": content}])) != 2:
        yield Finding("images", False, "the template drops images of users", OTHER_TEMPLATE)
    elif tools:
        reply: Message = {"role": "tool", "content": content, "name": "look_up", "tool_call_id": "call00000"}
        if template.count_images(template.encode_tail(template.prepare_media([reply]).messages, ended=True)) != 2:
            yield Finding("images", False, "the template drops images of tools", OTHER_TEMPLATE)


def _make_calls(count: int, id_format: str = "call0000{}") -> tuple[ToolCall, ...]:
    words = ['gnu "wild"\n', "gazelle"]
    return tuple(ToolCall(id_format.format(i), "look_up", json.dumps({"word": words[i]})) for i in range(count))


def _text_turn(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _calling_turn(calls: Sequence[ToolCall]) -> Message:
    rows = [build_call(call.id, call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": rows}


def _make_answers(turn: Message) -> tuple[Message, ...]:
    """The tool's reply to each call of the turn, or a user's message if it has none."""
    calls = turn.get("tool_calls") or ()
    if not calls:
        return ({"role": "user", "content": f"Is that all: {turn['content']}"},)
    return tuple(
        {"role": "tool", "tool_call_id": call["id"], "content": f"{index}. found\n"} for index, call in enumerate(calls)
    )


def _check_rollout(
    template: Template, task: Sequence[Message], turns: Sequence[Message], tools: Sequence[ToolSpec]
) -> Iterator[Finding]:
    """Compares a rollout of these turns, encoded incrementally, with one full rendering."""
    ledger = Ledger((Entry(Author.TASK, template.encode_prompt(task, tools), tuple(task)),))
    for index, turn in enumerate(turns):
        ids = render_reply(template, ledger.messages, turn, tools)
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), finish_reason="stop")
        if index < len(turns) - 1:
            answers = _make_answers(turn)
            calls = turn.get("tool_calls") or ()
            tail = template.encode_tail(answers, ended=template.is_turn_ended(ids), calls=calls)
            ledger += Entry(Author.TOOL, tail, answers)
    sanity = template.settings.sanity
    drifts = find_drifts(template, ledger, tools, sanity="ignore_strippable" if sanity == "disable" else sanity)
    if any(drift.cause is Cause.REASONING_STRIPPED for drift in drifts):
        detail = f"the template drops earlier reasoning; history={template.settings.history}"
        yield Finding(_ROLLOUT_CHECK, True, detail)
    if any(drift.cause is Cause.EMPTY_REASONING for drift in drifts):
        detail = f"the template drops its empty reasoning from earlier turns; history={template.settings.history}"
        yield Finding(_ROLLOUT_CHECK, True, detail)
    for drift in drifts:
        if not drift.is_harmless:
            remedy = _IGNORE_SPACE if drift.cause is Cause.WHITESPACE else OTHER_TEMPLATE
            detail = f"what a turn appends is not what the template renders in the end: {drift}"
            yield Finding(_ROLLOUT_CHECK, False, detail, remedy)


def _check_tool_turns(template: Template, task: Sequence[Message], max_calls: int | None) -> Iterator[Finding]:
    check, several = "several calls in a turn", template.max_calls is None
    if not several and (max_calls or 1) > 1:
        detail = f"the template writes one call per turn only, but `limits.parallel_calls` is {max_calls}"
        yield Finding(check, False, detail, "set `limits.parallel_calls: 1`")
    elif not several:
        yield Finding(check, True, "the template writes one call per turn only")
    turns = [_make_calls(1), _make_calls(2 if several else 1)]
    final = _text_turn("A gnu is an antelope.")
    yield from _check_rollout(template, task, [*map(_calling_turn, turns), final], [_TOOL])


def _check_text_before_call(template: Template, task: Sequence[Message]) -> Iterator[Finding]:
    """Tells whether text of the policy before a call stays where it is; if not, the ledger is exact all the same."""
    check, answers = "text before a call", "so that it is counted as drift"
    turn = {**_calling_turn(_make_calls(1)), "content": "I look it up."}
    dialog = [*task, turn, *_make_answers(turn), _text_turn("A gnu is an antelope.")]
    try:
        template.chat.render(dialog, [_TOOL])
    except TemplateError:
        if template.settings.history == "inference_template":
            remedy = "set `template.history: full`, which does not render earlier turns again"
            yield Finding(check, False, "the template rejects text before a call", remedy)
        else:
            yield Finding(check, True, f"the template rejects it, {answers}")
        return
    try:
        moved = any(not finding.is_ok for finding in _check_rollout(template, task, dialog[len(task) :: 2], [_TOOL]))
    except TemplateError:
        moved = True
    if moved:
        yield Finding(check, True, f"the template moves it or drops it later, {answers}")


def _check_parser(template: Template, task: Sequence[Message]) -> Iterator[Finding]:
    """Checks that the parser reads calls as the template writes them."""
    count = 1 if template.max_calls == 1 else 2
    # In some families a call's id contains its name.
    if not any(_parses(template, task, _make_calls(count, form)) for form in ("call0000{}", "functions.look_up:{}")):
        ids = render_reply(template, task, _calling_turn(_make_calls(count)), [_TOOL])
        text = template.tokenizer.decode(ids)
        yield Finding(
            "the parser",
            False,
            f"the parser '{template.parser.name}' does not read the calls that the template writes as {text!r}",
            "set `template.parser` to the parser of this model's family",
        )


def _parses(template: Template, task: Sequence[Message], calls: Sequence[ToolCall]) -> bool:
    try:
        parsed = template.parse_turn(render_reply(template, task, _calling_turn(calls), [_TOOL])).calls
    except TemplateError:
        return False
    expected = [(call.name, parse_arguments(call.arguments)) for call in calls]
    return [(call.name, parse_arguments(call.arguments)) for call in parsed] == expected


def _check_control_tokens(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    """Checks that an answer with the text of every control token adds none of them to the prompt."""
    hostile = "".join(template.tokenizer.control_ids)
    control_ids = frozenset(template.tokenizer.control_ids.values())
    for turn in turns:
        for answer in _make_answers(turn):
            harmless_ids, hostile_ids = (
                [id for id in template.encode_tail([{**answer, "content": content}], ended=True) if id in control_ids]
                for content in ("x", hostile)
            )
            if harmless_ids != hostile_ids:
                detail = f"text of a {answer['role']} message becomes control tokens"
                yield Finding("control tokens in an answer", False, detail, OTHER_TEMPLATE)


def _check_system_prompt(template: Template, used: bool) -> Iterator[Finding]:
    if not template.chat.takes_system:
        remedy = "put what it says into the question, and leave `system` unset"
        yield Finding("the system prompt", not used, "the template rejects system messages", remedy if used else "")
        return
    system: Message = {"role": "system", "content": MARK}
    if MARK not in template.chat.render([system, {"role": "user", "content": "x"}]):
        yield Finding("the system prompt", True, "the template drops system messages")
    user: Message = {"role": "user", "content": MARK}
    default = strip_fences(template.chat.render([user])).partition(MARK)[0]
    empty = strip_fences(template.chat.render([{"role": "system", "content": ""}, user])).partition(MARK)[0]
    if default != empty and len(default) > len(empty):
        yield Finding("the system prompt", True, f"the template adds a system prompt if none is given: {default!r}")


def _check_time(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    """Checks that messages contain no time of rendering, which would make each rendering different.

    The date in the system prompt is fine.
    """
    if any(template.chat.writes_time(_make_answers(turn), template.stop_tokens) for turn in turns):
        detail = "the template writes the time of rendering into messages"
        yield Finding("the time of day", False, detail, OTHER_TEMPLATE)
