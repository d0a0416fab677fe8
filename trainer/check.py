"""`mtrl-train check`: checks tools, data, model, template and memory before any weights are loaded; prints remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text as Line

from gateway.errors import ConfigError, ConfigErrors, GatewayError
from gateway.plural import format_count
from gateway.session import AnyGateway
from gateway.types import Outcome, ToolCall, ToolSpec
from trainer.data.state_names import check_state_names
from trainer.data.tasks import INTERACTION_PREFIX
from trainer.data.tasks import check_task_names as check_rows
from trainer.finding import Finding, Grade, count_problems, print_finding
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.rollout.loop import add_instructions
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutSettings
from trainer.rollout.task import Task
from trainer.setup import (
    find_empty_folder,
    find_unknown_tools,
    load_data,
    load_template,
    make_gateway,
    probe_for_job,
    trust_model,
    unavailable_servers,
)
from trainer.view.show import print_rollouts
from trainer.weight_files import read_weight_files

if TYPE_CHECKING:
    from trainer.template import Template


async def check(settings: RolloutSettings, console: Console, *, model: bool, data: bool) -> bool:
    """Prints the findings and an example rollout; returns True if nothing is wrong."""
    found: list[Finding] = []

    def tell(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            print_finding(finding, console)

    async with make_gateway(settings, tells_start=True) as gateway:
        tell(_check_tools(gateway, settings))
        tell(await check_parts(settings, gateway))
        tasks, findings = _load_rows(settings, gateway) if data else ((), [])
        tell(findings)
        template, findings = _load_template(settings, gateway) if model else (None, [])
        tell(findings)
        if template is not None:
            tell(_check_template(template, settings, gateway, tasks))
            tell(_check_memory(settings))
        if template is not None and not any(finding.grade == "wrong" for finding in found):
            console.print()
            messages = tasks[0].messages if tasks else ({"role": "user", "content": "(a task of yours)"},)
            example = example_rollout(template, gateway.specs, messages)
            print_rollouts([example], console, rollout=0, decode=template.tokenizer.decode)
    verdict = count_problems(found, "everything is in order")
    console.print(Line(f"\n{verdict}"))
    return verdict == "everything is in order"


def _check_tools(gateway: AnyGateway, settings: RolloutSettings) -> Iterator[Finding]:
    names = [spec.name for spec in gateway.specs if spec.audience == "policy"]
    heard = [spec.name for spec in gateway.specs if spec.audience == "loop"]
    grade: Grade = "ok" if names else "note"
    yield Finding(
        grade, f"{format_count(len(names), 'tool')}: {', '.join(names) or 'none'}", find_empty_folder(settings.tools)
    )
    interactions = [name.removeprefix(INTERACTION_PREFIX) for name in heard if name.startswith(INTERACTION_PREFIX)]
    yield Finding("ok", f"interactions: {', '.join(interactions) or 'none'}")
    for server in unavailable_servers(gateway):
        yield Finding("note" if server.optional else "wrong", server.problem, server.remedy)
    for error in find_unknown_tools(gateway):
        yield Finding("wrong", f"{error.where}: {error.problem}", error.remedy)


async def check_parts(settings: BaseRolloutSettings, gateway: AnyGateway) -> list[Finding]:
    """What the sections of plug-ins say when they are tried, such as how an environment's episode begins."""
    findings = []
    for part in settings.parts:
        try:
            if answer := await part.try_out(gateway, settings):
                findings.append(Finding("ok", answer))
        except ConfigErrors as error:
            findings += [Finding("wrong", f"{one.where}: {one.problem}", one.remedy) for one in _flatten_errors(error)]
        except GatewayError as error:
            problem, _, remedy = str(error).partition("\n  remedy: ")
            findings.append(Finding("wrong", problem, remedy))
    return findings


def _load_rows(settings: RolloutSettings, gateway: AnyGateway) -> tuple[Sequence[Task], list[Finding]]:
    """The rows, without any if they cannot be read, and what is wrong with them."""
    tasks: Sequence[Task] = ()
    try:
        tasks = load_data(settings, settings.data)
        mistakes = check_rows(tasks, gateway.specs) + check_state_names(tasks, gateway)
    except ConfigError as error:
        mistakes = list(_flatten_errors(error))
    if not mistakes:
        return tasks, [Finding("ok", f"{format_count(len(tasks), 'row')} of {settings.data}")]
    return tasks, [Finding("wrong", f"{mistake.where}: {mistake.problem}", mistake.remedy) for mistake in mistakes]


def _flatten_errors(error: ConfigError) -> Iterator[ConfigError]:
    """The single errors in an error that may hold several."""
    if isinstance(error, ConfigErrors):
        for inner in error.errors:
            yield from _flatten_errors(inner)
    else:
        yield error


def _load_template(settings: RolloutSettings, gateway: AnyGateway) -> tuple[Template | None, list[Finding]]:
    """The model's chat template, unless the model cannot be used, and what its weight files say."""
    from trainer.policy.export_model import require_matching_weights
    from trainer.policy.memory_parts import load_meta_model
    from trainer.policy.settings import PolicyError
    from trainer.template import TemplateError

    try:
        trust_model(settings, settings.model)
        weights = read_weight_files(settings.model)
        with suppress(PolicyError):  # Told with the memory.
            require_matching_weights(settings.model, weights, load_meta_model(settings.model))
        template = load_template(settings.model, settings.template, gateway.specs)
    except ConfigError as error:
        return None, [
            Finding("wrong", f"{mistake.where}: {mistake.problem}".removeprefix(": "), mistake.remedy)
            for mistake in _flatten_errors(error)
        ]
    except TemplateError as error:
        return None, [Finding("wrong", error.problem, error.remedy)]
    text = f"{weights.parameters:,} parameters in {format_count(weights.files, 'weight file')}, all whole"
    return template, [Finding("ok", text)] if weights.files else []


def _check_template(
    template: Template, settings: RolloutSettings, gateway: AnyGateway, tasks: Sequence[Task]
) -> Iterator[Finding]:
    stops = ", ".join(template.stop_tokens)
    yield Finding("ok", f"template of {settings.model}; parser {template.parser.name}; turns end with {stops}")
    yield Finding("ok", describe_images(template))
    report = probe_for_job(template, settings, gateway.specs, [tasks] if tasks else [])
    for finding in report.findings:
        if finding.detail:
            yield Finding("note" if finding.is_ok else "wrong", f"{finding.check}: {finding.detail}", finding.remedy)
    if report.cure:
        yield Finding("note", f"with {report.cure} the template passes all checks", f"set {report.cure}")
    if report.is_ok:
        yield Finding("ok", "the template only appends, and the parser reads what it writes")


def describe_images(template: Template) -> str:
    """What happens to images with this model."""
    if template.image_processor is None:
        from trainer.vision.family import FAMILIES

        return f"it reads text only: images become notes; vision models are {', '.join(FAMILIES)}"
    names = {id: token for token, id in template.tokenizer.control_ids.items()}
    where = "in its message" if template.image_layout == "in_tool_message" else "in a user's message behind it"
    barred = ", ".join(names.get(id, str(id)) for id in template.banned_ids)
    return f"it reads images: those of tools are {where}; it never samples {barred}"


def _check_memory(settings: RolloutSettings) -> Iterator[Finding]:
    from trainer.policy.memory_plan import plan_memory
    from trainer.policy.settings import PolicyError

    try:
        planned = plan_memory(settings, settings.model)
    except PolicyError as error:
        yield Finding("wrong", error.problem, error.remedy)
        return
    yield Finding("ok" if planned.fits else "wrong", str(planned), planned.remedy)


def example_rollout(template: Template, specs: Sequence[ToolSpec], task: Sequence[Message]) -> Rollout:
    """A rollout of a task as it would look, with made-up policy turns; no tool is called."""
    from trainer.template import render_reply

    offered = [spec for spec in specs if spec.audience == "policy"]
    asked = tuple(add_instructions(task, offered))
    ledger = Ledger((Entry(Author.TASK, template.encode_prompt(asked, offered), asked),))
    if offered:
        call = ToolCall("call00001", offered[0].name, "{}")
        turn: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}}],
        }
        fields = {"tool_call_id": call.id, "name": call.name, "content": "(what the tool answers)"}
        answer: Message = {"role": "tool", **fields}
        ids = render_reply(template, asked, turn, offered)
        ledger += Entry(Author.POLICY, ids, (turn,), logprobs=(0.0,) * len(ids), finish_reason="stop", calls=(call,))
        ledger += Entry(
            Author.TOOL,
            template.encode_tail((answer,), ended=True, calls=turn["tool_calls"]),
            (answer,),
            outcomes=(Outcome.OK,),
            source=call.name,
        )
    last: Message = {"role": "assistant", "content": "(the answer)"}
    ids = render_reply(template, ledger.messages, last, offered)
    ledger += Entry(Author.POLICY, ids, (last,), logprobs=(0.0,) * len(ids), finish_reason="stop")
    return Rollout("shown, not played", ledger, StopReason.DONE)
