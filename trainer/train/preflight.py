"""Checks before a run that need no model and call nothing: whether its tasks, limits and rewards fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from gateway.errors import ConfigError, ConfigErrors
from gateway.feedback.base import plain_text
from gateway.types import ToolSpec
from trainer.algorithms.train_batch import can_learn_from_single_rollouts
from trainer.check import Finding
from trainer.policy.learning_rate import find_unusual_rate
from trainer.reward.functions import find_truth_problem
from trainer.rollout.instructions import add_instructions
from trainer.rollout.task import Task
from trainer.template import Template, TemplateError
from trainer.template.media_layout import has_media
from trainer.train.disk_space import forecast_checkpoints
from trainer.train.job import DEMO_TASKS_CHECKED, Job
from trainer.train.run_folder import RUNS
from trainer.train.settings import DEMOS

MAX_TASKS = 1000
"""Tasks that are read; what is wrong with a data set is wrong with its first rows."""
MEASURED_PROMPTS = 8
"""Of the longest prompts in characters, so many are measured in tokens."""
MIN_ROOM = 16
"""Tokens that must be left for the policy after a prompt."""
OTHER_TRUTH = "give each row a `ground_truth`, or name another reward function"


def require_ready(job: Job) -> None:
    """Raises ConfigErrors with everything that would keep the run from learning."""
    wrong = [finding for finding in find_problems(job) if finding.grade == "wrong"]
    if wrong:
        raise ConfigErrors([ConfigError(finding.text, remedy=finding.remedy) for finding in wrong])


def find_problems(job: Job) -> Iterator[Finding]:
    """What keeps the run from learning (`wrong`), and what is worth knowing (`note`)."""
    yield from _check_group_size(job)
    yield from _check_stop_ids(job.template)
    if job.settings.environment is None and not job.settings.objects:
        tasks = _read_tasks(job)
        yield from _check_truth(job, tasks)
        if job.settings.agent is None and not hasattr(job.stepper, "begin"):  # It may replace the row's messages.
            yield from _check_prompts(job, tasks)


def find_warnings(job: Job) -> Iterator[Finding]:
    """What a run may be started with all the same: an unusual learning rate, too little space for checkpoints."""
    settings = job.settings
    if unusual := find_unusual_rate(settings.update, job.parameters):
        yield Finding("wrong" if unusual.is_harmful else "note", unusual.problem, unusual.remedy)
    if forecast := forecast_checkpoints(settings, job.parameters, settings.out or RUNS):
        yield Finding("wrong", *forecast)
    if settings.model in DEMOS and settings.data not in DEMOS:
        problem = "the demo's model knows the demo's questions and hardly anything else"
        yield Finding("note", problem, "name a `model` (--model) for tasks of another kind")


def _read_tasks(job: Job) -> list[Task]:
    """Tasks as the first stage with their data changes them."""
    most = DEMO_TASKS_CHECKED if job.settings.data in DEMOS else MAX_TASKS
    stages = {stage.data: stage for stage in reversed(job.settings.curriculum.stages)}
    return [stage.apply(task) for name, stage in stages.items() for task in islice(job.tasks.train[name], most)]


def _check_group_size(job: Job) -> Iterator[Finding]:
    settings = job.settings
    if settings.n == 1 and not can_learn_from_single_rollouts(settings.algorithm):
        problem = f"n is 1, but {settings.algorithm.name} compares the rollouts of a task with each other"
        yield Finding(
            "wrong", f"{problem}, so nothing would be learned", "set `n: 8`, or `algorithm.name: reinforce_pp`"
        )


def _check_stop_ids(template: Template) -> Iterator[Finding]:
    """Ids that end a turn although they are ordinary text, which the policy writes anywhere."""
    known = set(template.tokenizer.control_ids.values())
    for id in template.stop_ids:
        if id not in known:
            text = template.tokenizer.decode([id])
            problem = f"a turn would end wherever the policy writes {text!r}: its id {id} is among the model's stop ids"
            remedy = "correct `eos_token_id` in the model's generation_config.json; it names the token at a turn's end"
            yield Finding("wrong", problem, remedy)


def _check_truth(job: Job, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Rows without the right answer that a built-in reward function compares with."""
    for name, component in job.settings.reward.components.items():
        problems = [
            (task, problem) for task in tasks if (problem := find_truth_problem(component.function, task)) is not None
        ]
        if not problems:
            continue
        task, problem = problems[0]
        rows = "every row" if len(problems) == len(tasks) else f"{len(problems)} of {len(tasks)} rows"
        text = f"reward.components.{name}: {component.function!r} cannot score {rows}: {problem} ({task.location})"
        yield Finding("wrong" if 2 * len(problems) > len(tasks) else "note", text, OTHER_TRUTH)


def _check_prompts(job: Job, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Compares the limits with the longest prompts and the shortest one."""
    texts = sorted((task for task in tasks if not has_media(task.messages)), key=_count_characters)
    if not texts:
        return
    most = job.settings.limits.rollout_tokens
    shortest, longest = (
        max(_count_tokens(job, task) for task in some) for some in (texts[:1], texts[-MEASURED_PROMPTS:])
    )
    if longest + MIN_ROOM <= most:
        return
    every = shortest + MIN_ROOM > most
    rows = f"every prompt (the shortest has {shortest} tokens" if every else "some prompts (the shortest fits"
    problem = f"limits.rollout_tokens is {most}, which leaves the policy no room after {rows}, the longest {longest})"
    room = min(job.settings.limits.turn_tokens, 4096)
    remedy = f"set `limits.rollout_tokens` to {longest + room} or more" + ("" if every else ", or shorten these rows")
    yield Finding("wrong" if every else "note", problem, remedy)


def _count_characters(task: Task) -> int:
    return sum(len(plain_text(message.get("content"))) for message in task.messages)


def _count_tokens(job: Job, task: Task) -> int:
    """The length of the prompt with the tools that the task is offered; 0 if the template cannot write it."""
    specs = offered_specs(job.gateway.specs, task)
    try:
        return len(job.template.encode_prompt(add_instructions(task.messages, specs), specs))
    except TemplateError:  # Told by its rollout.
        return 0


def offered_specs(specs: Sequence[ToolSpec], task: Task) -> list[ToolSpec]:
    """The tools that a task's policy may call."""
    names = task.session_task.tools
    return [spec for spec in specs if spec.audience == "policy" and (names is None or spec.name in names)]
