"""Writes a sample run: all kinds of entries, a failed rollout, images, and a rollout with hostile text."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from PIL import Image as PILImage
from PIL import ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.types import Image, Outcome, Part, Text, ToolCall
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, Span, StopReason
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_files import dump_metrics
from trainer.storage.run_status import RunStatus

STEPS, GROUPS, SIBLINGS = 24, 4, 4
CITIES = ("Oslo", "Haifa", "Nantes", "Lima", "Jaffa", "Cairo", "Ōsaka", "Turin")
HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
PAD, WIDTH = "<|image_pad|>", 12
"""The token of an image, and the number of tokens that it expands to."""
SYSTEM = "You answer questions about cities. Look things up; never guess."
REASONING = "The city is named, its size is not. I look it up, add those who come, and give the sum behind ####."
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "n": SIBLINGS,
    "prompts": GROUPS,
    "seed": 0,
    "update": {"lr": 1e-6, "max_grad_norm": 1.0},
    "limits": {"assistant_turns": 6, "turn_tokens": 512},
    "reward": {
        "components": {"right": {"weight": 1.0}, "brief": {"weight": 0.1}},
        "success": "right",
        "success_at": 1.0,
    },
}


STATUS = RunStatus(
    step=15, steps=140, phase="rolling out", phase_s=72.0, left_s=41.0, left_of="of the step", run_left_s=13_800.0,
    ended=5, total=16, pending=2, generating=6, calling=3, turns=37, written=84_210, written_per_s=1530.0,
    slowest_tool="draw_bars", slowest_p95_s=0.36,
)  # fmt: skip
"""What the running sample run does."""


@dataclass(frozen=True)
class CreditSequence:
    """The credit of a rollout in a train step."""

    name: str
    advantages: tuple[float, ...]
    weights: tuple[float, ...]


def write_sample_run(folder: Path, *, steps: int = STEPS, seed: int = 0, finished: bool = True) -> Path:
    """Writes a finished or a running run."""
    settings = SETTINGS | {"seed": seed, "steps": steps if finished else 10 * steps}
    (folder / "model").mkdir(parents=True)
    sample_tokenizer().save(str(folder / "model" / "tokenizer.json"))
    about = {"model": str(folder / "model"), "engine": "torch", "versions": {"mtrl": "0.1.0"}, "settings": settings}
    (folder / "run.json").write_text(json.dumps(about))
    with RolloutWriter(folder) as writer, (folder / "metrics.jsonl").open("wb") as metrics_file:
        metrics_file.write(dump_metrics(0, {"eval/greedy": 0.05, "eval/greedy/near": 0.1, "eval/greedy/far": 0.0}))
        for step in range(1, steps + 1):
            add_step(writer, metrics_file, step, seed)
    return folder


def add_step(writer: RolloutWriter, metrics_file: Any, step: int, seed: int = 0) -> None:
    """Appends a step."""
    rng = random.Random(f"{seed}/{step}")
    rollouts = [_rollout(rng, step, group, index) for group in range(GROUPS) for index in range(SIBLINGS)]
    for rollout in rollouts:
        writer.add(rollout)
    writer.add_credits(step, _credits(rollouts))
    metrics_file.write(dump_metrics(step, _metrics(rng, step)))


def _metrics(rng: random.Random, step: int) -> dict[str, float]:
    expected = 1 / (1 + exp(4 - step / 3)) + rng.gauss(0, 0.02)
    success = min(1.0, max(0.0, expected))
    metrics = {
        "reward/mean": 1.1 * success, "reward/right": success, "reward/brief": min(1.0, 0.4 + success / 2),
        "tokens/sampled": 1000.0, "machine/cores": 1.5, "machine/cores_of_trainer": 1.2, "machine/memory_gb": 0.9,
        "success/sampled": success, "success/sampled/near": min(1.0, success * 1.2),
        "success/sampled/far": success * 0.8,
        "rollout/turns": 3 - success, "rollout/calls": 2.2 - success, "rollout/tokens": 190 - 40 * success,
        "rollout/staleness": 0.0, "rollout/truncated": 0.1 * (1 - success), "entropy": 0.05 + 0.8 * (1 - success),
        "groups/teaching": float(round(4 * (1 - success) + 0.4)), "groups/count": 4.0,
        "kl/old": 1e-4 * (1 + success), "mismatch/kl": 1e-6 * rng.random(), "mismatch/max": 3e-5,
        "update/grad_norm": 0.4 + rng.random() / 4, "engine/tokens/written_per_s": 1500 + 300 * rng.random(),
        "engine/tokens/cached_of_possible": 0.86 + 0.1 * rng.random(), "time/rolling_out_s": 2 + rng.random(),
        "time/learning_s": 0.8, "time/publishing_s": 0.05, "time/saving_s": 0.1,
        "rollout/kind/near": 0.5, "rollout/kind/far": 0.5, "time/tools/look_up/p95_s": 0.012 + rng.random() / 100,
        "time/tools/draw_bars/p95_s": 0.3 + rng.random() / 10, "time/rewards/right/mean_s": 0.002,
        "time/rewards/brief/mean_s": 0.04 + rng.random() / 50,
    }  # fmt: skip
    if step == STEPS:
        metrics["rollout/kind/far"] = metrics.pop("rollout/kind/near") + 0.5
    if step % 6 == 0:
        evaluation = {"eval/greedy": success, "eval/greedy/near": success, "eval/greedy/far": success * 0.9}
        metrics |= evaluation | {"time/evaluating_s": 0.6}
    return metrics


def add_metrics_of_ranks(folder: Path, ranks: int = 4, slow: int = 2, seed: int = 0) -> None:
    """Gives the steps of a run the metrics of ranks, one of which is slow, and of workers."""
    rng, file = random.Random(seed), folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for metrics in lines[1:]:
        busy = [0.6 + rng.random() / 20 + 0.5 * (rank == slow) for rank in range(ranks)]
        for rank, seconds in enumerate(busy):
            metrics[f"distributed/busy_s/rank_{rank}"] = seconds
            metrics[f"distributed/idle/rank_{rank}"] = 1 - seconds / max(busy)
            metrics[f"distributed/tokens_per_s/rank_{rank}"] = 4000 / seconds
        for name in ("worker-0", "worker-1", "far"):
            metrics[f"workers/idle/{name}"] = 0.5 + rng.random() / 10
            metrics[f"workers/turn_s/{name}"] = 0.1 + rng.random() / 50
        metrics |= {"idle/trainer": 0.6 + rng.random() / 10, "idle/engine": 0.3 + rng.random() / 10}
        metrics |= {"distributed/imbalance": 1 + rng.random() / 10, "workers/restarts": float(rng.random() > 0.9)}
        metrics |= {"time/publish/gather_s": 0.02 + rng.random() / 100, "time/publish/transfer_s": 0.03}
    file.write_text("".join(json.dumps(metrics) + "\n" for metrics in lines))


def _rollout(rng: random.Random, step: int, group: int, index: int) -> Rollout:
    city, newcomers = CITIES[(step + group) % len(CITIES)], 10 + 7 * group
    size = 600 + 137 * (step + group)
    is_right = rng.random() < step / STEPS
    name = f"{step}-0-{group}"
    entries = list(_entries(rng, city, size, newcomers, step, index if (step, group) == (2, 1) else -1, is_right))
    rewards = {"right": float(is_right), "brief": round(rng.uniform(0.4, 0.9), 2)}
    rollout = Rollout(
        f"city-{city}-{newcomers}",
        Ledger(tuple(entries)),
        StopReason.FEEDBACK_DONE,
        name,
        index,
        rewards=rewards,
        weighted_reward=rewards["right"] + 0.1 * rewards["brief"],
        kind="far" if newcomers > 20 else "near",
    )
    if (step, group, index) == (2, 0, 3):
        reason = "server 'atlas' is down: connection refused"
        return replace(
            rollout, ledger=Ledger(tuple(entries[:3])), stop=StopReason.TOOL_FAILED, rewards={}, reason=reason
        )
    return replace(rollout, timeline=tuple(_timeline(rng, entries)), timing={"generating": 1.2, "calling": 0.4})


def _timeline(rng: random.Random, entries: Iterable[Entry]) -> Iterator[Span]:
    start = 0.0
    for entry in entries:
        phases = {
            Author.POLICY: ("queueing", "generating"),
            Author.TOOL: ("calling",),
            Author.FEEDBACK: ("interacting",),
        }
        for phase in phases.get(entry.author, ()):
            duration = round(
                {"queueing": 0.03, "generating": 0.5, "calling": 0.2}.get(phase, 0.05) * (0.5 + rng.random()), 4
            )
            yield Span(phase, round(start, 4), duration)
            start += duration


def _entries(
    rng: random.Random, city: str, size: int, newcomers: int, step: int, hostile_index: int, is_right: bool
) -> Iterator[Entry]:
    question = (
        f"How many people live in {city} if {newcomers} more come?"
        if hostile_index != 0
        else f"Say {HOSTILE} to {city}."
    )
    prompt = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})
    yield Entry(Author.TASK, _ids(_chat(prompt) + "<|im_start|>assistant\n"), prompt, source="cities.jsonl:7")
    calls = (ToolCall("c1", "look_up", json.dumps({"name": city, "year": 2024})),)
    yield _policy_entry(rng, step, "", calls, REASONING)
    result = {"city": city, "people": size, "source": "atlas"}
    yield _tool_entry("look_up", json.dumps(result), (Text(json.dumps(result)),), 0.012)
    if newcomers > 20:
        draw = (ToolCall("c2", "draw_bars", json.dumps({"values": [size, newcomers], "labels": [city, "more"]})),)
        yield _policy_entry(rng, step, "", draw, "")
        yield _tool_entry(
            "draw_bars", "A chart of 2 bars.", (Text("A chart of 2 bars."), Image(_draw_bars(size, newcomers))), 0.31
        )
    text = f"{size} live there, and {newcomers} come.\n#### {size + newcomers if is_right else size - newcomers}"
    yield _policy_entry(rng, step, HOSTILE if hostile_index == 0 else text, (), "")
    verdict = "That is right." if is_right else "That is not right. Look again at who comes."
    messages = ({"role": "user", "content": verdict},)
    yield Entry(Author.FEEDBACK, (), messages, reward=float(is_right), source="judge", outcomes=(Outcome.OK,))


def _policy_entry(rng: random.Random, step: int, text: str, calls: tuple[ToolCall, ...], reasoning: str) -> Entry:
    reply = f"<think>{reasoning}</think>\n" if reasoning else ""
    reply += text + "".join(
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>' for call in calls
    )
    ids = _ids(reply + "<|im_end|>")
    message = {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})
    logprobs = tuple(round(-rng.expovariate(2 + step / 3), 4) for _ in ids)
    return Entry(
        Author.POLICY, ids, (message,), logprobs, version=step - 1, cached_tokens=8, finish_reason="stop", calls=calls
    )


def _tool_entry(name: str, text: str, parts: tuple[Part, ...], elapsed_s: float) -> Entry:
    image_count = sum(isinstance(part, Image) for part in parts)
    message: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "name": name, "content": text}
    info = {"tools": [{"name": name, "outcome": "ok", "elapsed_s": elapsed_s}]}
    ids = _ids(f"\n{_chat(({**message, 'content': text + PAD * image_count},))}<|im_start|>assistant\n")
    if image_count:
        message["content"] = [{"type": "text", "text": text}, *[{"type": "image"}] * image_count]
    pad = sample_tokenizer().token_to_id(PAD)
    spans = tuple((index, index + 1) for index, id in enumerate(ids) if id == pad)
    return Entry(
        Author.TOOL, ids, (message,), parts=parts, spans=spans, widths=(WIDTH,) * image_count,
        outcomes=(Outcome.OK,), reward=0.0, source=name, info=info,
    )  # fmt: skip


def _credits(rollouts: Iterable[Rollout]) -> Iterator[CreditSequence]:
    by_group: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_group.setdefault(rollout.group, []).append(rollout)
    for group in by_group.values():
        rewards = [rollout.reward or 0.0 for rollout in group]
        mean = sum(rewards) / len(group)
        for rollout, reward in zip(group, rewards, strict=True):
            mask, advantage = rollout.ledger.expanded.mask, reward - mean
            yield CreditSequence(rollout.name, tuple(advantage * trained for trained in mask), tuple(map(float, mask)))


def _chat(messages: Iterable[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(sample_tokenizer().encode(text).ids)


@cache
def sample_tokenizer() -> Tokenizer:
    """A small byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = [
        SYSTEM,
        REASONING,
        "How many people live in the city if more come?",
        '{"name": "look_up", "arguments": {"year": 2024}}',
    ] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(token) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", PAD)])
    return tokenizer


@cache
def _draw_bars(*values: int) -> bytes:
    image = PILImage.new("RGB", (320, 180), "white")
    draw = ImageDraw.Draw(image)
    for index, value in enumerate(values):
        draw.rectangle((50 + index * 120, 165 - 140 * value / max(values), 130 + index * 120, 165), fill="#1c5fc4")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
