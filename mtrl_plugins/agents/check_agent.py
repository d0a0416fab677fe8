"""Checks a run's agent before training: it plays one rollout, which is shown with what the agent changed, by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from anyio import to_thread
from rich.console import Console
from rich.text import Text

from gateway.errors import ConfigError
from gateway.plural import format_count
from mtrl_plugins.agents.settings import AgentSettings
from trainer.finding import print_finding
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.observer import NullObserver
from trainer.rollout.rollout import CHANGED_BY_AGENT, Rollout
from trainer.template import Template, TemplateError, render_reply
from trainer.train.job import Job, open_job
from trainer.train.preflight import find_problems
from trainer.train.settings import TrainSettings
from trainer.view.progress import show_warm_start
from trainer.view.show import print_rollouts
from trainer.view.text import to_line

GROUP = "0-0-0"
SHOWN_TOKENS = 4
"""Tokens that are shown of a difference."""


async def check_agent(settings: TrainSettings, console: Console) -> bool:
    """Runs the checks of the start, and lets the agent play a rollout; returns True if no problem was found."""
    agent = AgentSettings.of(settings)
    if agent is None:
        remedy = "add `agent:`; `mtrl-train --config FILE --dry-run` checks a run without one"
        raise ConfigError("has no agent", field="agent", remedy=remedy)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mtrl-check-")))
        with show_warm_start(console) as on_progress:
            job = await stack.enter_async_context(open_job(settings, on_warm_start=on_progress))

        def log(text: str) -> None:
            console.print(Text(text), soft_wrap=True)

        log(agent.describe())
        findings = await to_thread.run_sync(lambda: list(find_problems(job)))
        for finding in findings:
            print_finding(finding, console)
        engine = await stack.enter_async_context(job.make_engine(folder, None, log))
        task = next(islice(next(iter(job.tasks.train.values())), 1))
        runner = job.make_runner(engine, NullObserver())
        group = await job.scorer.score(task, [await runner.run(task, group=GROUP)])
        is_scored = bool(group.scored)
        rollout = group.scored[0].rollout if is_scored else group.failed[0].rollout
        print_rollouts([rollout], console, rollout=0, decode=job.template.tokenizer.decode)
        log("")
        for line in _summary_lines(agent, job, rollout):
            log(line)
        if not is_scored:
            log(f"not scored: {group.failed[0].reason}")
            if output := str(rollout.infos.get("agent_output", "")).strip():
                log(f"the agent's output ends: {output[-1000:]}")
        problems = sum(finding.grade == "wrong" for finding in findings) + (not is_scored)
        log(f"{format_count(problems, 'problem')} to fix" if problems else "the agent can be trained")
        return not problems


def _summary_lines(agent: AgentSettings, job: Job, rollout: Rollout) -> Iterator[str]:
    """Counts, and each turn that the agent changed."""
    written = sum(len(turn.ids) for turn in rollout.turns)
    yield f"{len(rollout.ledgers)} branches; {written} tokens sampled, each of them trained once"
    metrics = agent.compute_metrics([rollout])
    yield ", ".join(f"{name.removeprefix('agent/')} {value:g}" for name, value in metrics.items())
    turn = -1
    for ledger in rollout.ledgers:
        for index, entry in enumerate(ledger):
            turn += entry.author is Author.POLICY
            if CHANGED_BY_AGENT in entry.info:
                yield f"turn {turn}: the agent changed {', '.join(entry.info[CHANGED_BY_AGENT])}"
                yield f"  {_describe_change(job.template, ledger, index, entry)}; trained as it was sampled"


def _describe_change(template: Template, ledger: Ledger, index: int, entry: Entry) -> str:
    """What would be trained if the turn were encoded again as the agent sent it back."""
    before = [message for earlier in ledger.entries[:index] for message in earlier.messages]
    if (sent_back := entry.info.get("sent_back")) is None:
        return "what the agent sent back was too long to be kept"
    try:
        ids = render_reply(template, before, sent_back)
    except TemplateError as error:
        return f"the template cannot encode what the agent sent back ({error})"
    pairs = enumerate(zip(entry.ids, ids, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(entry.ids), len(ids)))
    if first == len(entry.ids) == len(ids):
        return f"encoded again, it has the same {len(ids)} tokens"
    shown = [to_line(template.tokenizer.decode(some[first : first + SHOWN_TOKENS])) for some in (entry.ids, ids)]
    return (
        f"sampled were {len(entry.ids)} tokens; encoded again it has {len(ids)}, others from token {first} on:"
        f" {shown[0]!r} becomes {shown[1]!r}"
    )
