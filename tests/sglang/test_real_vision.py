"""Vision models on a real server: image widths and logprobs equal the trainer's."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
import yaml

from gateway.types import Image
from mtrl_plugins.demo.model_cache import find_or_build_model
from mtrl_plugins.demo.sight.sight_tasks import KIND
from mtrl_plugins.demo.warm_start import Recipe
from tests.sglang.policy import AGREE, way_of
from tests.trainer.vision.vision_models import odd_pictures, picture, seeing_model
from trainer.engine.base import EXACT_TOLERANCE, EngineError, Sampling
from trainer.engine.sglang.server_process import VISION_CACHE_VARIABLE, ServerOptions, ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.verify import TrainerReference
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.template import Template

ROOT = Path(__file__).parents[2]
STEPS = 2
SHORT = Recipe(demo="sight", skill_steps=100, habit_steps=0, kinds=(KIND,))
REWARDS = {"components": {"sevenths": {"function": f"{ROOT}/tests/trainer/train/sevenths.py:sevenths"}}}
"""Groups of any policy have a gradient by it."""
SMALL = {
    "prompts": 4, "n": 4, "steps": STEPS, "reward": REWARDS, "record": False,
    "evaluation": {"every": 0, "after": False},
}  # fmt: skip
OPTIONS = ServerOptions(context=512, cache_tokens=16384, device="cpu", tokenizer=True)
SHOWN = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "image"}]
PICTURES = [picture(1, 60, 50), picture(2, 90, 47)]
"""Of sizes that no model takes: who brings them there in another way, has other pixels."""
ODD = [[one, one] for one in odd_pictures(28, 56).values()]
"""What is clear in a file, of sixteen bits, or not upright, a server would see otherwise."""
ASKED = Sampling(max_tokens=8, temperature=0)
"""What is drawn may be so unlikely that float32 rounds more."""
PATCH = {"qwen3_vl": 16}


class DenseVisionModel:
    def __init__(self, engine: SGLangEngine, policy: Policy, template: Template) -> None:
        assert template.image_processor is not None
        self.engine, self.policy, self.eyes = engine, policy, template.image_processor
        self.ids = template.encode_prompt([{"role": "user", "content": SHOWN}])

    async def agrees(self, images: Sequence[Image], sampling: Sampling = ASKED) -> list[float]:
        """What the server wrote, as likely as it found it; without a picture of its own, where it wrote one's id."""
        asked = replace(sampling, stop_ids=self.eyes.family.banned_ids)
        written = await self.engine.generate(self.ids, asked, images=images)
        assert written.prompt_tokens == len(self.eyes.prepare_prompt(self.ids, images).ids)
        ids = [token for token in written.ids if token not in asked.stop_ids]
        assert len(ids) >= 2
        reference = self.policy.compute_logprobs((*self.ids, *ids), images)[-len(ids) :]
        assert list(written.logprobs[: len(ids)]) == pytest.approx(reference, abs=AGREE)
        return reference


@asynccontextmanager
async def seeing(kind: str, way: str, folder: Path) -> AsyncIterator[DenseVisionModel]:
    """SGLang takes rows of pixels for something else, where they are not of patches of 14 or 16 in two frames."""
    model = seeing_model(folder / "model", kind, patch=PATCH.get(kind, 14), frames=2)
    template = Template.load(model)
    policy = Policy.load(model, UpdateSettings(), image_processor=template.image_processor)
    server = ServerProcess(model, OPTIONS, log=folder / "sglang.log")
    reference = TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, template.image_processor)
    async with SGLangEngine([server], way_of(way, model), reference=reference) as engine:
        assert engine.capabilities.supports_images
        with anyio.fail_after(900):
            yield DenseVisionModel(engine, policy, template)


def moved(policy: Policy) -> None:
    """All of it: eyes and words."""
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=noise))


@pytest.mark.parametrize(("kind", "way"), [("qwen2_5_vl", "disk"), ("qwen3_vl", "group")])
async def test_image_widths_and_logprobs_agree_with_the_trainer(kind: str, way: str, tmp_path: Path) -> None:
    async with seeing(kind, way, tmp_path) as server:
        first, swapped = await server.agrees(PICTURES), await server.agrees(PICTURES[::-1])
        assert first[0] != swapped[0]
        moved(server.policy)
        await server.engine.publish(server.policy.weights, 1)
        assert server.engine.agreement is not None and server.engine.agreement.max_difference <= EXACT_TOLERANCE
        for images in (PICTURES, PICTURES[::-1], *(ODD if kind == "qwen2_5_vl" else ())):
            await server.agrees(images)


async def test_server_with_a_stale_vision_cache_generates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISION_CACHE_VARIABLE, "100")
    async with seeing("qwen2_vl", "tensors", tmp_path) as server:
        await server.engine.publish(server.policy.weights, 0)
        await server.agrees(PICTURES)
        moved(server.policy)
        with pytest.raises(EngineError, match=rf"has other weights than were published.*{VISION_CACHE_VARIABLE}=0"):
            await server.engine.publish(server.policy.weights, 1)


async def test_vision_job_learns_on_sglang(tmp_path: Path) -> None:
    """Eyes and words move with every step, and the server has them before the next."""
    job = yaml.safe_load((ROOT / "mtrl_plugins" / "demo" / "jobs" / "sight.yaml").read_text())
    model = {"model": str(find_or_build_model(SHORT, tmp_path))}
    (tmp_path / "small.yaml").write_text(json.dumps(job | SMALL | model))
    run = tmp_path / "run"
    words = ["--config", str(tmp_path / "small.yaml"), "--engine", "sglang", "--out", str(run)]
    with anyio.fail_after(1500):
        done = await anyio.run_process([sys.executable, "-m", "trainer.cli", *words], cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout/lost"] for step in steps] == [0] * STEPS
    assert all(step["agreement/max"] <= EXACT_TOLERANCE for step in steps)
    assert all(step["mismatch/max"] <= EXACT_TOLERANCE and step["update/grad_norm"] for step in steps)
