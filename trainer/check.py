"""Looks at everything that a run stands on before any weight is loaded, and says what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text as Line

from gateway.errors import ConfigError, ConfigErrors
from gateway.session import AnyGateway
from gateway.types import Outcome, ToolCall, ToolSpec
from trainer.config import RolloutSettings
from trainer.data.check import check as check_rows
from trainer.data.tasks import load
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.run.rollout import Rollout, StopReason
from trainer.stage import down, gateway_of, template_of
from trainer.view.show import show

if TYPE_CHECKING:
    from trainer.template import Template

Grade = Literal["ok", "note", "wrong"]
MARKS: dict[Grade, tuple[str, str]] = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "wrong": ("FAIL", "red")}


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    what: str
    remedy: str = ""


async def check(settings: RolloutSettings, console: Console, *, model: bool, data: bool) -> bool:
    """Prints what is found; true where nothing is wrong. Model and data are looked at where they are named."""
    found: list[Finding] = []

    def tell(finding: Finding) -> None:
        found.append(finding)
        mark, colour = MARKS[finding.grade]
        console.print(Line.assemble((mark, colour), f" {finding.what}"), soft_wrap=True)
        if finding.remedy:
            console.print(Line(f"     remedy: {finding.remedy}"), soft_wrap=True)

    async with gateway_of(settings) as gateway:
        for finding in _tools(gateway):
            tell(finding)
        for finding in _rows(settings, gateway) if data else ():
            tell(finding)
        template = None
        for finding in _model(settings, gateway) if model else ():
            tell(finding)
        if model and not any(finding.grade == "wrong" for finding in found):
            template = template_of(settings.model, settings.template, gateway.specs)
            console.print()
            show([shown(template, gateway.specs)], console, rollout=0, decode=template.tokens.decode)
    wrong = sum(finding.grade == "wrong" for finding in found)
    console.print(Line("\neverything is in order" if not wrong else f"\n{wrong} to mend"))
    return not wrong


def _tools(gateway: AnyGateway) -> Iterator[Finding]:
    names = [spec.name for spec in gateway.specs if spec.audience == "policy"]
    heard = [spec.name for spec in gateway.specs if spec.audience == "loop"]
    grade: Grade = "ok" if names else "note"
    yield Finding(grade, f"{len(names)} tools: {', '.join(names) or 'none'}")
    yield Finding("ok", f"interactions: {', '.join(name.removeprefix('feedback_') for name in heard) or 'none'}")
    for server in down(gateway):
        yield Finding("note" if server.optional else "wrong", server.problem, server.remedy)


def _rows(settings: RolloutSettings, gateway: AnyGateway) -> Iterator[Finding]:
    try:
        tasks = load(settings.data, system=settings.system, columns=settings.columns)
        mistakes = check_rows(tasks, gateway.specs)
    except ConfigError as error:
        mistakes = list(_each(error))
    for mistake in mistakes:
        yield Finding("wrong", f"{mistake.where}: {mistake.problem}", mistake.remedy)
    if not mistakes:
        yield Finding("ok", f"{len(tasks)} rows of {settings.data}")


def _each(error: ConfigError) -> Iterator[ConfigError]:
    """One by one, whatever they were gathered in."""
    if isinstance(error, ConfigErrors):
        for inner in error.errors:
            yield from _each(inner)
    else:
        yield error


def _model(settings: RolloutSettings, gateway: AnyGateway) -> Iterator[Finding]:
    from trainer.template import TemplateError, probe

    try:
        template = template_of(settings.model, settings.template, gateway.specs)
    except (TemplateError, ConfigError) as error:
        yield Finding("wrong", error.problem, error.remedy)
        return
    stops = ", ".join(template.stops)
    yield Finding("ok", f"template of {settings.model}; parser {template.parser.name}; turns end with {stops}")
    yield Finding("ok", seeing(template))
    report = probe(template)
    for finding in report.findings:
        if finding.text:
            yield Finding("note" if finding.ok else "wrong", f"{finding.check}: {finding.text}", finding.remedy)
    if report.ok:
        yield Finding("ok", "the template only appends, and the parser reads what it writes")
    yield from _memory(settings)


def seeing(template: Template) -> str:
    """What becomes of pictures."""
    if template.eyes is None:
        from trainer.vision.family import NAMES

        becomes = "are told of in words" if template.settings.blind == "note" else "end a rollout"
        return f"it reads text alone, and pictures {becomes} (template.blind); what sees is {', '.join(NAMES)}"
    names = {id: token for token, id in template.tokens.control.items()}
    where = "in its message" if template.layout == "in_tool_message" else "in a user's message behind it"
    barred = ", ".join(names.get(id, str(id)) for id in template.barred)
    return f"it sees: what a tool shows stands {where} (template.images); it never writes {barred}"


def _memory(settings: RolloutSettings) -> Iterator[Finding]:
    from trainer.policy.errors import PolicyError
    from trainer.policy.memory import plan

    try:
        planned = plan(settings, settings.model)
    except PolicyError as error:
        yield Finding("wrong", error.problem, error.remedy)
        return
    yield Finding("ok" if planned.fits else "wrong", str(planned), planned.remedy)


def shown(template: Template, specs: list[ToolSpec] | Any) -> Rollout:
    """A rollout as it would be, with a policy of our own making; no tool is called for it."""
    from trainer.template import written

    offered = [spec for spec in specs if spec.audience == "policy"]
    asked: tuple[Message, ...] = ({"role": "user", "content": "(a task of yours)"},)
    ledger = Ledger((Entry(Author.TASK, template.open(asked, offered), asked),))
    if offered:
        call = ToolCall("call00001", offered[0].name, "{}")
        turn: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}}],
        }
        said = {"tool_call_id": call.id, "name": call.name, "content": "(what the tool answers)"}
        answer: Message = {"role": "tool", **said}
        ids = written(template, asked, turn, offered)
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), stop="stop", calls=(call,))
        ledger += Entry(
            Author.TOOL, template.tail((answer,), ended=True), (answer,), outcomes=(Outcome.OK,), source=call.name
        )
    last: Message = {"role": "assistant", "content": "(the answer)"}
    ids = written(template, ledger.messages, last, offered)
    ledger += Entry(Author.POLICY, ids, (last,), logprobs=(0.0,) * len(ids), stop="stop")
    return Rollout("shown, not played", ledger, StopReason.DONE)
