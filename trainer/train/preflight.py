"""Checks before a run that load no weights and call nothing: whether its tasks, limits and rewards fit together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, ConfigErrors
from gateway.feedback.base import plain_text
from gateway.finding import Finding, Grade
from gateway.plural import format_count
from gateway.types import ToolSpec
from trainer.data.row_to_task import PROMPT_COLUMNS, name_meant_columns, read_json_chat
from trainer.data.tasks import CHECKED_TASKS, example_names, iterate_texts
from trainer.distributed.rank_environment import count_local_ranks
from trainer.distributed.settings import count_ranks, count_shards
from trainer.engine.base import EngineError
from trainer.engines import has_gpu
from trainer.policy.memory_parts import find_unknown_targets, load_meta_model
from trainer.policy.memory_plan import total_memory
from trainer.policy.optimizers import find_unusual_rate
from trainer.policy.placement import Placement, plan_placement, shares_gpu_with_server
from trainer.policy.settings import MICRO_BATCHES, PolicyError
from trainer.reward.functions import find_truth_problem
from trainer.rollout.loop import add_instructions
from trainer.rollout.steppers import StepperFactory
from trainer.rollout.task import Task
from trainer.template import Template, TemplateError
from trainer.template.media_layout import has_media
from trainer.train.checkpoint import forecast_checkpoints
from trainer.train.job import Job
from trainer.train.run_folder import RUNS
from trainer.train.settings import TrainSettings

MAX_TASKS = 1000
"""Tasks that are read; what is wrong with a data set is wrong with its first rows."""
MEASURED_PROMPTS = 8
"""Of the longest prompts in characters, so many are measured in tokens."""
RANKS_PER_CORE = 2
"""Without GPUs; with more, ranks wait so long for each other that they count as lost."""
USABLE = 0.8
"""The share of a machine's memory that a run may plan with; systems and others have the rest."""
MIN_ROOM = 16
"""Tokens that must be left for the policy after a prompt."""
OTHER_TRUTH = "give each row a `ground_truth`, or name another reward function"


def require_ready(job: Job) -> list[Finding]:
    """What is worth knowing about a run. Raises ConfigErrors with everything that would keep it from learning."""
    findings = list(find_problems(job))
    wrong = [ConfigError(finding.text, remedy=finding.remedy) for finding in findings if finding.grade == "wrong"]
    if wrong:
        raise ConfigErrors(wrong)
    return findings


def plan_job(job: Job) -> Placement:
    """How trainer and engine share a GPU, and the memory that they need. The plan may not fit."""
    settings, distributed = job.settings, job.settings.distributed
    shares_gpu = shares_gpu_with_server(settings, count_local_ranks(distributed))
    shards, ranks = count_shards(distributed, job.model), count_ranks(distributed)
    return plan_placement(settings, job.model, shares_gpu=shares_gpu, shards=shards, ranks=ranks)


def choose_micro_batch(job: Job) -> None:
    """Chooses the tokens of a micro-batch where the settings leave them open: as many as fit into the machine's memory.

    What other programs have taken of it does not count: on one machine without a GPU, a run is the same to the bit.
    """
    settings, update = job.settings, job.settings.update
    if update.micro_batch_tokens is not None:
        return
    sharing = 1 if has_gpu() else count_local_ranks(settings.distributed)
    for tokens in MICRO_BATCHES:
        chosen = update.model_copy(update={"micro_batch_tokens": tokens})
        job.settings = settings.model_copy(update={"update": chosen})
        needed = sharing * plan_job(job).plan.needed
        if tokens <= settings.limits.rollout_tokens or needed < USABLE * total_memory():  # A rollout is never split.
            return


def find_problems(job: Job) -> Iterator[Finding]:
    """What keeps the run from starting or learning (`wrong`), and what is worth knowing (`note`)."""
    yield from _check_memory(job)
    yield from _check_teacher(job)
    yield from _check_machine(job.settings)
    yield from _check_stop_ids(job.template)
    yield from _check_adapters(job)
    yield from _find_warnings(job)
    parts = job.settings.parts
    if job.settings.sft is not None:
        yield from _check_traces(job)
        return
    if not any(part.brings_rows for part in parts) and not job.settings.objects:
        rows = _RowChecks(job)
        for task in _read_tasks(job):
            rows.add(task)
        yield from rows.find_truth_problems()
        acts_unseen = any(part.acts_unseen for part in parts)
        if not acts_unseen and not isinstance(job.stepper, StepperFactory):  # It may replace the row's messages.
            yield from rows.find_long_prompts()


def _check_memory(job: Job) -> Iterator[Finding]:
    plan = plan_job(job).plan
    if not plan.fits:
        yield Finding("wrong", f"this run does not fit: {plan}", plan.remedy)


def _check_teacher(job: Job) -> Iterator[Finding]:
    """A teacher that has other tokens than the model, or that does not answer."""
    reference, remedy = job.settings.algorithm.kl.reference, "name a teacher whose tokenizer is that of the model"
    if reference is None:
        return
    if reference.url is not None and job.template.image_processor is not None:
        problem, remedy = "a served teacher is asked for text only", "name its folder (`algorithm.kl.reference.model`)"
        yield Finding("wrong", f"algorithm.kl.reference.url: {problem}", remedy)
        return
    from trainer.policy.reference import find_token_mismatch

    try:
        problem = find_token_mismatch(reference, job.template.tokenizer, job.model)
    except PolicyError as error:
        problem, remedy = error.problem, error.remedy
    if problem:
        yield Finding("wrong", f"algorithm.kl.reference: {problem}", remedy)


def _find_warnings(job: Job) -> Iterator[Finding]:
    """What a run may be started with all the same: an unusual learning rate, too little space for checkpoints."""
    settings = job.settings
    if unusual := find_unusual_rate(settings.update, job.parameters):
        yield Finding("note", *unusual)
    limit, shape = settings.limits.rollout_tokens, load_meta_model(job.model).config.get_text_config()
    if limit > (positions := getattr(shape, "max_position_embeddings", None) or limit):
        problem = f"limits.rollout_tokens is {limit:,}, but the model's configuration has {positions:,} positions"
        yield Finding("note", problem, f"set `limits.rollout_tokens` to {positions} or less")
    if forecast := forecast_checkpoints(settings, job.model, job.parameters, settings.out or RUNS):
        yield Finding("note", *forecast)
    examples = example_names()
    if settings.model in examples and settings.data not in examples:
        problem = "the demo's model knows the demo's questions and hardly anything else"
        yield Finding("note", problem, "name a `model` (--model) for tasks of another kind")


def _read_tasks(job: Job) -> Iterator[Task]:
    """Tasks as the first stage with their data changes them, without their media."""
    most = CHECKED_TASKS if job.settings.data in example_names() else MAX_TASKS
    stages = {stage.data: stage for stage in reversed(job.settings.curriculum.stages)}
    for name, stage in stages.items():
        yield from map(stage.apply, islice(iterate_texts(job.tasks.train[name]), most))


def _check_machine(settings: TrainSettings) -> Iterator[Finding]:
    """What this machine lacks: SGLang where it is to be started, and a core for each rank without GPUs."""
    if settings.engine == "sglang":
        from trainer.engine.sglang.server_process import find_python

        try:
            find_python()
        except EngineError as error:
            remedy = "install SGLang as the message says, name running servers by their address, or leave `engine` out"
            yield Finding("wrong", f"`engine: sglang`: {error}", remedy)
    ranks, cores = count_local_ranks(settings.distributed), len(os.sched_getaffinity(0))
    if ranks > RANKS_PER_CORE * cores and not has_gpu():
        problem = f"`distributed.ranks: {ranks}`, but there is no GPU and there are {cores} cores"
        yield Finding(
            "wrong", f"{problem}: ranks would wait for each other", f"use at most {RANKS_PER_CORE * cores} ranks"
        )


def _check_traces(job: Job) -> Iterator[Finding]:
    """Traces that are too long, that the template cannot write, or whose calls its parser does not read back."""
    from trainer.data.traces import TraceTask, iterate_problems  # only `sft` has any
    from trainer.rollout.trace_player import encode_trace

    def check(task: TraceTask) -> None:
        encode_trace(task, job.template, job.gateway.specs, job.settings.limits.rollout_tokens)

    for traces in job.tasks.train.values():
        for error in iterate_problems(traces, check):
            yield Finding("wrong", f"{error.file}: {error.field}: {error.problem}", error.remedy)


def _check_adapters(job: Job) -> Iterator[Finding]:
    """Targets of LoRA that no layer has: where others have one, such a target would be left out silently."""
    lora = job.settings.update.lora
    if lora is None or not lora.target_modules:
        return
    unknown, layers = find_unknown_targets(load_meta_model(job.model), lora.target_modules)
    for target in unknown:
        near = closest_match(target, layers)
        remedy = f"did you mean {near!r}?" if near else f"name some of {', '.join(layers)}"
        yield Finding("wrong", f"update.lora.target_modules: the model has no layer {target!r}", remedy)


def _check_stop_ids(template: Template) -> Iterator[Finding]:
    """Ids that end a turn although they are ordinary text, which the policy writes anywhere."""
    known = set(template.tokenizer.control_ids.values())
    for id in template.stop_ids:
        if id not in known:
            text = template.tokenizer.decode([id])
            problem = f"a turn would end wherever the policy writes {text!r}: its id {id} is among the model's stop ids"
            remedy = "correct `eos_token_id` in the model's generation_config.json; it names the token at a turn's end"
            yield Finding("wrong", problem, remedy)


class _RowChecks:
    """What is wrong with rows, which are looked at one by one; only a few texts are kept."""

    def __init__(self, job: Job) -> None:
        self._job, self._rows, self._without_truth, self._json_chats = job, 0, 0, 0
        self._first: Task | None = None
        self._bad_rows: Counter[str] = Counter()
        """By component: the rows that it cannot score."""
        self._first_problems: dict[str, str] = {}
        self._shortest: Task | None = None
        self._longest: list[tuple[int, int, Task]] = []
        """Of prompts without media: characters, the row, and the task."""

    def add(self, task: Task) -> None:
        """Looks at a row."""
        self._rows += 1
        self._first = self._first or task
        prompt = next((value for key in PROMPT_COLUMNS if (value := task.columns.get(key)) is not None), None)
        self._json_chats += read_json_chat(prompt) is not None
        self._without_truth += task.truth is None
        for name, component in self._job.settings.reward.components.items():
            if (problem := find_truth_problem(component.function, task)) is not None:
                self._bad_rows[name] += 1
                self._first_problems.setdefault(name, f"{problem} ({task.location})")
        if has_media(task.messages):
            return
        size = _count_characters(task)
        if self._shortest is None or size < _count_characters(self._shortest):
            self._shortest = task
        heappush(self._longest, (size, self._rows, task))
        if len(self._longest) > MEASURED_PROMPTS:
            heappop(self._longest)

    def find_truth_problems(self) -> Iterator[Finding]:
        """Rows without the right answer that a built-in reward function compares with, and chats in texts."""
        if self._json_chats:
            prompts = format_count(self._json_chats, "prompt")
            yield Finding(
                "note", f"messages are read from JSON in a text: {prompts}", "write them as lists of messages"
            )
        meant = name_meant_columns(self._first.columns, "answer") if self._first else ""
        remedy = meant or OTHER_TRUTH
        for name, count in self._bad_rows.items():
            function = self._job.settings.reward.components[name].function
            rows = "every row" if count == self._rows else f"{count} of {self._rows} rows"
            problem = f"{function!r} cannot score {rows}: {self._first_problems[name]}"
            grade: Grade = "wrong" if 2 * count > self._rows else "note"
            yield Finding(grade, f"reward.components.{name}: {problem}", remedy)

        for name in self._job.scorer.truth_readers if self._without_truth else ():
            rows = (
                "every row lacks"
                if self._without_truth == self._rows
                else f"{self._without_truth} of {self._rows} lack"
            )
            function = self._job.settings.reward.components[name].function
            problem = f"{function!r} reads `attempt.truth`, which is None where a row has no `ground_truth`: {rows} it"
            yield Finding("note", f"reward.components.{name}: {problem}", remedy)

    def find_long_prompts(self) -> Iterator[Finding]:
        """Compares the limits with the longest prompts and the shortest one."""
        if self._shortest is None:
            return
        limits = self._job.settings.limits
        shortest = _count_tokens(self._job, self._shortest)
        longest = max(_count_tokens(self._job, task) for _, _, task in self._longest)
        if longest + MIN_ROOM <= limits.rollout_tokens:
            return
        every = shortest + MIN_ROOM > limits.rollout_tokens
        rows = f"every prompt (the shortest has {shortest} tokens" if every else "some prompts (the shortest fits"
        problem = f"limits.rollout_tokens is {limits.rollout_tokens}, which leaves the policy no room after {rows}"
        remedy = f"set `limits.rollout_tokens` to {longest + min(limits.turn_tokens, 4096)} or more"
        remedy += "" if every else ", or shorten these rows"
        yield Finding("wrong" if every else "note", f"{problem}, the longest {longest})", remedy)


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
