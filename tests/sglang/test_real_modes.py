"""Training modes on a real server: the version and logprob of every token."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from pathlib import Path

import anyio
import pytest
from rich.console import Console
from transformers import PreTrainedModel

from tests.sglang.policy import AGREE, EOS, PROMPT, finds, moved, opened, written_on
from tests.trainer.train.jobs import small_job
from trainer.engine.base import Generation, Sampling
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference
from trainer.storage.rollout_file import Rollouts
from trainer.train.replay_step import replay_step
from trainer.train.start import train

STEPS = 3
TOOLS = "tools:\n  - class_name: mtrl_plugins.demo.facts.lookup.LookUp\n  - function: calculator:calculate\n"
CALCULATOR = 'def calculate(expression: str) -> str:\n    """Works out a sum."""\n    return "0"\n'


@pytest.mark.parametrize("in_place", [False, True])
async def test_tokens_have_the_version_that_sampled_them_and_its_logprob(
    in_place: bool, server: ServerProcess, policy: PreTrainedModel
) -> None:
    """In place, what goes on has read the earlier ids under the earlier weights: its logprobs are no trainer's."""
    ended: list[Generation] = []
    old = deepcopy(policy)

    async def write(engine: SGLangEngine) -> None:
        ended.append(await engine.generate(PROMPT, Sampling(max_tokens=440, banned_ids=(EOS,)), key="a"))

    async with opened(server, policy=policy, in_place=in_place) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(write, engine)
        await written_on(engine, 1)
        moved(policy, by=0.01)
        await engine.publish(policy.state_dict(), 1)
    (written,) = ended
    first = written.versions.count(0)
    assert 0 < first < 440 and written.versions == (0,) * first + (1,) * (440 - first)
    ids = (*PROMPT, *written.ids)
    by_old, by_new = (finds(one)(ids)[len(PROMPT) - 1 :] for one in (old, policy))
    expected = by_old[:first] + by_new[first:]
    apart = [abs(one - other) for one, other in zip(written.logprobs, expected, strict=True)]
    assert max(apart[:first]) <= AGREE
    assert max(apart[first:]) <= AGREE if not in_place else max(apart[first:]) > 0
    assert max(abs(one - other) for one, other in zip(by_old, by_new, strict=True)) > 100 * AGREE


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off", "asynchronous"])
async def test_every_mode_learns_within_its_staleness_limit(mode: str, server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "calculator.py").write_text(CALCULATOR)
    more = {"demo": {"kinds": ["fact"]}, "steps": STEPS, "evaluation": {"every": 0}, "sampling": {"temperature": 1.0}}
    settings = small_job(mode=mode, tools=str(tmp_path), engine=server.url, **more)
    run, console = tmp_path / "run", Console(file=io.StringIO(), width=200)
    with anyio.fail_after(900):
        await train(settings, run, console)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["agreement/max"] for line in lines) <= AGREE
    assert [line["step"] for line in lines] == [1, 2, 3] and [line["rollout/lost"] for line in lines] == [0] * STEPS
    most = {"synchronous": [0, 0, 0], "one_step_off": [0, 1, 1], "asynchronous": [0, 1, 1]}[mode]
    learned = 0
    for rollout in Rollouts(run):
        step = rollout.step or int(rollout.group.split("-")[0])
        ages = {step - 1 - version for version in rollout.versions} if step else set()
        assert all(0 <= age <= most[step - 1] for age in ages), (step, ages)
        learned += bool(step)
    assert learned == STEPS * settings.prompts * settings.n
    assert [line.get("staleness/max", 0) <= bound for line, bound in zip(lines, most, strict=True)] == [True] * STEPS
    assert await replay_step(run, STEPS, console), console.file.getvalue()  # type: ignore[attr-defined]


async def test_server_without_a_gpu_accepts_memory_release_and_continues(
    server: ServerProcess, policy: PreTrainedModel
) -> None:
    """It answers 200 and null, and frees nothing: there is no memory saver for CPUs. Not measured on a GPU yet."""
    with anyio.fail_after(900):
        async with SGLangEngine(
            [server.url], TensorSync(), reference=TrainerReference(finds(policy)), releases_memory=True
        ) as engine:
            await engine.publish(policy.state_dict(), 0)
            for version in (1, 2):
                assert await engine.release_memory() and engine.replicas[0].released == ["weights", "kv_cache"]
                moved(policy, by=0.01)
                await engine.publish(policy.state_dict(), version)
                written = await engine.generate(PROMPT, Sampling(max_tokens=20, banned_ids=(EOS,)))
                assert written.versions == (version,) * 20 and engine.replicas[0].released == []
                assert engine.agreement and engine.agreement.max_difference <= AGREE
