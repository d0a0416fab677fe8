"""Before any weight is loaded, a model's template shows on a small rollout that it can be trusted, or the run stops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gateway.types import ToolCall, ToolSpec
from trainer.ledger import Author, Entry, Ledger, Message

from .chat import MARK, called
from .drift import Cause, drifts, value_of
from .errors import TemplateError
from .template import Template
from .tokens import plain
from .written import written

_TOOL = ToolSpec(
    "look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
)
_TASK: tuple[Message, ...] = (
    {"role": "system", "content": "You answer."},
    {"role": "user", "content": "What is a gnu?"},
)
_OTHER_TEMPLATE = "give another by the setting `template.chat_template`"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. A finding that is not `ok` stops the run; one that is, with a text, is worth knowing."""

    check: str
    ok: bool
    text: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"{'ok' if self.ok else 'FAILED'}: {self.check}" + (f": {self.text}" if self.text else "")]
        return "\n  remedy: ".join([*lines, self.remedy] if self.remedy else lines)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def require(self) -> None:
        """Raises what is wrong, all of it at once."""
        failed = [finding for finding in self.findings if not finding.ok]
        if failed:
            problems = dict.fromkeys(finding.text for finding in failed)
            remedies = dict.fromkeys(finding.remedy for finding in failed)
            raise TemplateError(f"the chat template cannot be trusted: {'; '.join(problems)}", "; ".join(remedies))


_BLANK = "set `sanity` to ignore_strippable, if white space does not matter"
_ROLLED = "a rollout"


def probe(template: Template, *, tools: bool = True, feedback: bool = True) -> ProbeReport:
    """Tries all that rollouts rely on: `tools` where the policy calls any, `feedback` where users answer it."""
    if tools and not template.chat.calls:  # All else about tools would fail, and for that reason alone.
        return ProbeReport((*probe(template, tools=False, feedback=feedback).findings, _callless(template)))
    turns = [_says("A bird."), *([_asks(_calls(1))] if tools else [])]
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "the generation prompt": lambda: _prompts(template),
        "the end of a turn": lambda: _ends(template, turns),
        "control tokens in an answer": lambda: _injected(template, turns),
        "the time of day": lambda: _timed(template, turns),
        "the system prompt": lambda: _system(template),
    }
    if tools:
        checks["tools"] = lambda: _tools(template)
        checks["the parser"] = lambda: _parses(template)
        checks["several calls in a turn"] = lambda: _tool_turns(template)
    if template.eyes:
        checks["images"] = lambda: _shows(template, tools)
    if feedback:
        checks["a rollout with feedback"] = lambda: _rolled(template, [*turns, *turns, _says("An antelope.")])
    return ProbeReport(tuple(finding for name, check in checks.items() for finding in _found(name, check)))


def _found(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return [*check()] or [Finding(name, True)]
    except TemplateError as error:
        return [Finding(name, False, error.problem, error.remedy or _OTHER_TEMPLATE)]


def _prompts(template: Template) -> Iterator[Finding]:
    check = "the generation prompt"
    user: Message = {"role": "user", "content": "x"}
    asked = plain(template.chat.text([user], prompt=True))
    begun = plain(template.chat.text([user, _says(MARK)])).partition(MARK)[0].removeprefix(asked)
    if not template.chat.prompt and template.tokens.last_special(begun):
        yield Finding(check, False, f"the template adds none, though a turn begins with {begun!r}", _OTHER_TEMPLATE)
    if template.opened:
        yield Finding(check, True, f"it begins the policy's turn with {template.opened!r}")


def _ends(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    for turn in turns:
        end = template.chat.follow(_answers(turn), template.stops).end
        closing = template.tokens.last_special(template.chat.closing(called="tool_calls" in turn))
        if end not in template.stops and closing not in template.stops:
            yield Finding(
                "the end of a turn",
                False,
                f"the template ends a turn by {end!r}, where the policy would not stop",
                "name its id in `eos_token_id` of the model's generation_config.json",
            )


def _callless(template: Template) -> Finding:
    remedy = template.remedy or _OTHER_TEMPLATE
    return Finding("tools", False, "the template does not write the assistant's calls", remedy)


def _tools(template: Template) -> Iterator[Finding]:
    opened = plain(template.chat.text(_TASK, [_TOOL], prompt=True))
    reply: Message = {"role": "tool", "content": MARK, "name": "look_up", "tool_call_id": "call00000"}
    if "look_up" not in opened:
        yield Finding("tools", False, "the template does not write the tools that it is given", _OTHER_TEMPLATE)
    if MARK not in template.chat.follow([reply], template.stops).rest:
        yield Finding("tools", False, "the template drops what a tool replies", _OTHER_TEMPLATE)


def _shows(template: Template, tools: bool) -> Iterator[Finding]:
    """A place for each image, whoever shows it."""
    shown = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "."}]
    if template.places(template.open([{"role": "user", "content": shown}])) != 2:
        yield Finding("images", False, "the template drops images that a user shows", _OTHER_TEMPLATE)
    elif tools:
        reply: Message = {"role": "tool", "content": shown, "name": "look_up", "tool_call_id": "call00000"}
        if template.places(template.tail(template.lay([reply]).messages, ended=True)) != 2:
            remedy = f"set `template.images: user_message`, or {_OTHER_TEMPLATE}"
            yield Finding("images", False, "the template drops images that a tool answers with", remedy)


def _calls(count: int, form: str = "call0000{}") -> tuple[ToolCall, ...]:
    words = ['gnu "wild"\n', "gazelle"]
    return tuple(ToolCall(form.format(i), "look_up", json.dumps({"word": words[i]})) for i in range(count))


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _asks(calls: Sequence[ToolCall]) -> Message:
    rows = [called(call.id, call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": rows}


def _answers(turn: Message) -> tuple[Message, ...]:
    """Of the tool to each call of the turn; of a user, where it makes none."""
    calls = turn.get("tool_calls") or ()
    if not calls:
        return ({"role": "user", "content": f"Is that all: {turn['content']}"},)
    return tuple(
        {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": f"{place}. found\n"}
        for place, call in enumerate(calls)
    )


def _rolled(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    """A rollout of these turns, appended by difference, and the same by one render."""
    ledger = Ledger((Entry(Author.TASK, template.open(_TASK, [_TOOL]), _TASK),))
    for place, turn in enumerate(turns):
        ids = written(template, ledger.messages, turn, [_TOOL])
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop")
        if place < len(turns) - 1:
            after = _answers(turn)
            ledger += Entry(Author.TOOL, template.tail(after, ended=template.ended(ids)), after)
    sanity = template.settings.sanity
    found = drifts(template, ledger, [_TOOL], sanity="ignore_strippable" if sanity == "disable" else sanity)
    if any(drift.cause is Cause.REASONING_STRIPPED for drift in found):
        text = f"the template takes earlier reasoning away; history={template.settings.history}"
        yield Finding(_ROLLED, True, text)
    for drift in found:
        if not drift.harmless:
            text = f"what a turn appends is not what the template writes in the end: {drift}"
            yield Finding(_ROLLED, False, text, _BLANK if drift.cause is Cause.WHITESPACE else _OTHER_TEMPLATE)


def _tool_turns(template: Template) -> Iterator[Finding]:
    several = _takes_several(template)
    if not several:
        yield Finding("several calls in a turn", True, "the template writes one call per turn only")
    yield from _rolled(template, [_asks(_calls(1)), _asks(_calls(2 if several else 1)), _says("A gnu is an antelope.")])


def _takes_several(template: Template) -> bool:
    try:
        template.chat.text([*_TASK, _asks(_calls(2))], [_TOOL])
    except TemplateError:
        return False
    return True


def _parses(template: Template) -> Iterator[Finding]:
    """A call as the template writes it must be the call that the parser reads."""
    count = 2 if _takes_several(template) else 1
    # In some families a call's id holds its name.
    if not any(_reads(template, _calls(count, form)) for form in ("call0000{}", "functions.look_up:{}")):
        text = template.tokens.decode(written(template, _TASK, _asks(_calls(count)), [_TOOL]))
        yield Finding(
            "the parser",
            False,
            f"the parser '{template.parser.name}' does not read the calls that the template writes as {text!r}",
            "choose the parser of this model's family by the setting `template.parser`",
        )


def _reads(template: Template, calls: Sequence[ToolCall]) -> bool:
    try:
        read = template.read(written(template, _TASK, _asks(calls), [_TOOL])).calls
    except TemplateError:
        return False
    return [(call.name, value_of(call)) for call in read] == [(call.name, value_of(call)) for call in calls]


def _injected(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    """An answer of every control token there is must not put one of them into the prompt."""
    hostile = "".join(template.tokens.control)
    control = frozenset(template.tokens.control.values())
    for turn in turns:
        for answer in _answers(turn):
            kept, put = (
                [id for id in template.tail([{**answer, "content": content}], ended=True) if id in control]
                for content in ("x", hostile)
            )
            if kept != put:
                text = f"what a {answer['role']} says becomes control tokens"
                yield Finding("control tokens in an answer", False, text, _OTHER_TEMPLATE)


def _system(template: Template) -> Iterator[Finding]:
    user: Message = {"role": "user", "content": MARK}
    before = plain(template.chat.text([user])).partition(MARK)[0]
    without = plain(template.chat.text([{"role": "system", "content": ""}, user])).partition(MARK)[0]
    if before != without and len(before) > len(without):
        yield Finding("the system prompt", True, f"where none is given, the template adds its own: {before!r}")


def _timed(template: Template, turns: Sequence[Message]) -> Iterator[Finding]:
    """The day in a system prompt is well; the time of writing in each message makes every render another."""
    if any(template.chat.clocked(_answers(turn), template.stops) for turn in turns):
        text = "the template writes the time of rendering into messages"
        yield Finding("the time of day", False, text, _OTHER_TEMPLATE)
