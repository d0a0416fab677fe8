"""The quick checks before a run: tasks, limits, rewards and group sizes that cannot teach anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from gateway.finding import Finding
from tests.sample_images import png
from tests.trainer.train.jobs import small_job
from trainer.data.tasks import iterate_texts, load_rows
from trainer.ledger import Message
from trainer.policy.settings import LoraSettings
from trainer.rollout.task import Task
from trainer.template.media_layout import has_media
from trainer.train.job import Job, TrainTasks, open_job
from trainer.train.preflight import find_problems, require_ready

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def job(anyio_backend: str) -> AsyncIterator[Job]:
    async with open_job(small_job()) as job:
        yield job


def with_tasks(job: Job, *tasks: Task) -> Job:
    settings = job.settings.model_copy(update={"data": "rows.jsonl"})
    return replace(job, settings=settings, tasks=TrainTasks({None: tasks}, tasks, is_held_out=True))


def with_settings(job: Job, **changes: Any) -> Job:
    settings = small_job(**changes)
    return replace(job, settings=settings.model_copy(update={"update": job.settings.update, **changes}))


def make_task(number: int = 0, truth: Any = "7", words: int = 3) -> Task:
    asked: tuple[Message, ...] = ({"role": "user", "content": "what is it " * words},)
    return Task(f"t{number}", asked, truth, location=f"rows.jsonl:{number + 1}")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


async def test_a_job_in_order_has_no_findings(job: Job) -> None:
    assert require_ready(job) == []


async def test_sglang_has_to_be_installed_where_it_is_to_be_started(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", "/nowhere/python")
    missing = only(list(find_problems(with_settings(job, engine="sglang"))))
    assert missing.grade == "wrong" and "cannot be executed" in missing.text and "install SGLang" in missing.remedy


async def test_many_more_ranks_than_cores_are_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    crowded = job.settings.distributed.model_copy(update={"ranks": 8})
    with pytest.raises(ConfigError, match="8`, but there is no GPU and there are 2 cores"):
        require_ready(with_settings(job, distributed=crowded))
    require_ready(with_settings(job, distributed=crowded.model_copy(update={"ranks": 4})))


async def test_rows_without_the_truth_that_their_reward_needs_are_counted(job: Job) -> None:
    broken = only(list(find_problems(with_tasks(job, make_task(0, None), make_task(1, None)))))
    assert broken.grade == "wrong" and "'outcome' cannot score every row: the task has no right answer" in broken.text
    assert "(rows.jsonl:1)" in broken.text and "give each row a `ground_truth`" in broken.remedy
    tasks = [make_task(number, "seven" if number == 4 else "7") for number in range(9)]
    some = only(list(find_problems(with_tasks(job, *tasks))))
    assert some.grade == "note" and "cannot score 1 of 9 rows: the task's right answer is not a number" in some.text
    with pytest.raises(ConfigError, match="every row"):
        require_ready(with_tasks(job, make_task(0, None)))


async def test_messages_in_a_json_text_are_read_and_the_operator_is_told(job: Job) -> None:
    asked = [{"role": "system", "content": "short"}, {"role": "user", "content": "[2, 3]?"}]
    rows = [{"messages": json.dumps(asked), "answer": "7"}, {"prompt": "[1, 2] has a role?", "answer": "7"}]
    tasks = load_rows(rows)
    assert [list(task.messages) for task in tasks] == [asked, [{"role": "user", "content": "[1, 2] has a role?"}]]
    told = only(list(find_problems(with_tasks(job, *tasks))))
    assert told.grade == "note" and told.text == "messages are read from JSON in a text: 1 prompt"


async def test_a_limit_that_prompts_exceed_is_compared_with_the_longest_and_the_shortest(job: Job) -> None:
    long, short = make_task(0, words=60), make_task(1)
    every = only(list(find_problems(with_tasks(job, long))))
    assert every.grade == "wrong" and every.text.startswith("limits.rollout_tokens is 160, which leaves the policy no")
    assert "every prompt" in every.text and "set `limits.rollout_tokens` to " in every.remedy
    some = only(list(find_problems(with_tasks(job, short, long))))
    assert some.grade == "note" and "some prompts" in some.text


async def test_adapters_for_layers_that_the_model_lacks_are_refused_even_beside_ones_that_it_has(job: Job) -> None:
    targets = ("q_proj", "layers.0.mlp.up_proj", "v_porj", "nothing_like_it")
    adapted = with_settings(job).settings.update.model_copy(update={"lora": LoraSettings(target_modules=targets)})
    settings = job.settings.model_copy(update={"update": adapted})
    misspelt, unknown = find_problems(replace(job, settings=settings))
    assert misspelt.grade == "wrong" and "the model has no layer 'v_porj'" in misspelt.text
    assert misspelt.remedy == "did you mean 'v_proj'?" and unknown.remedy.startswith(
        "name some of embed_tokens, q_proj"
    )


async def test_the_first_rows_are_checked_without_loading_their_media(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "which <image>? " * 2, "images": ["a.png", "a.png"], "answer": "red"} for _ in range(3)]
    (tmp_path / "a.png").write_bytes(png(8, 8))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "why?"}]))
    loaded = load_rows(tmp_path / "rows.jsonl")
    (tmp_path / "a.png").unlink()
    texts = list(iterate_texts(loaded))
    assert [has_media(task.messages) for task in texts] == [True, True, True, False]
    found = find_problems(replace(with_tasks(job), tasks=TrainTasks({None: loaded}, loaded, is_held_out=True)))
    assert "cannot score every row: the task's right answer is not a number" in only(list(found)).text
