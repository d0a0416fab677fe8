"""A run as a training leaves it, made in a moment: every kind of entry, what can go wrong, and text that means harm."""

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

from PIL import Image as Picture
from PIL import ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.types import Image, Outcome, Part, Text, ToolCall
from trainer.ledger import Author, Entry, Ledger
from trainer.run.file import Writer
from trainer.run.history import dump
from trainer.run.rollout import Rollout, Span, StopReason

STEPS, GROUPS, EACH = 24, 4, 4
CITIES = ("Oslo", "Haifa", "Nantes", "Lima", "Jaffa", "Cairo", "Ōsaka", "Turin")
HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
PAD, WIDTH = "<|image_pad|>", 12
"""What stands for a picture, and as how many tokens it is seen."""
SYSTEM = "You answer questions about cities. Look things up; never guess."
REASONING = "The city is named, its size is not. I look it up, add those who come, and give the sum behind ####."
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "n": EACH,
    "prompts": GROUPS,
    "seed": 0,
    "update": {"lr": 1e-6, "clip": 1.0},
    "limits": {"assistant_turns": 6, "turn_tokens": 512},
    "reward": {
        "components": {"right": {"weight": 1.0}, "brief": {"weight": 0.1}},
        "success": "right",
        "success_at": 1.0,
    },
}


@dataclass(frozen=True)
class Weighed:
    """What a step made of a rollout."""

    name: str
    advantages: tuple[float, ...]
    weights: tuple[float, ...]


def made(folder: Path, *, steps: int = STEPS, seed: int = 0, over: bool = True) -> Path:
    """A finished run, or one that still goes on."""
    settings = SETTINGS | {"seed": seed, "steps": steps if over else 10 * steps}
    (folder / "model").mkdir(parents=True)
    tokenizer().save(str(folder / "model" / "tokenizer.json"))
    about = {"model": str(folder / "model"), "engine": "torch", "versions": {"mtrl": "0.1.0"}, "settings": settings}
    (folder / "run.json").write_text(json.dumps(about))
    with Writer(folder) as writer, (folder / "metrics.jsonl").open("wb") as told:
        told.write(dump(0, {"eval/greedy": 0.05, "eval/greedy/near": 0.1, "eval/greedy/far": 0.0}))
        for step in range(1, steps + 1):
            add(writer, told, step, seed)
    return folder


def add(writer: Writer, told: Any, step: int, seed: int = 0) -> None:
    """One more step."""
    chance = random.Random(f"{seed}/{step}")
    rollouts = [_rollout(chance, step, group, index) for group in range(GROUPS) for index in range(EACH)]
    for rollout in rollouts:
        writer.add(rollout)
    writer.credit(step, _credits(rollouts))
    told.write(dump(step, _metrics(chance, step)))


def _metrics(chance: random.Random, step: int) -> dict[str, float]:
    learned = 1 / (1 + exp(4 - step / 3)) + chance.gauss(0, 0.02)
    right = min(1.0, max(0.0, learned))
    measured = {
        "reward/mean": 1.1 * right, "reward/right": right, "reward/brief": min(1.0, 0.4 + right / 2),
        "success/sampled": right, "success/sampled/near": min(1.0, right * 1.2), "success/sampled/far": right * 0.8,
        "rollout/turns": 3 - right, "rollout/calls": 2.2 - right, "rollout/tokens": 190 - 40 * right,
        "rollout/staleness": 0.0, "rollout/truncated": 0.1 * (1 - right), "entropy": 0.05 + 0.8 * (1 - right),
        "groups/teaching": float(round(4 * (1 - right) + 0.4)), "groups/count": 4.0,
        "kl/old": 1e-4 * (1 + right), "mismatch/kl": 1e-6 * chance.random(), "mismatch/max": 3e-5,
        "update/grad_norm": 0.4 + chance.random() / 4, "engine/tokens/written_per_s": 1500 + 300 * chance.random(),
        "engine/tokens/cached_of_possible": 0.86 + 0.1 * chance.random(), "time/rolling_out_s": 2 + chance.random(),
        "time/learning_s": 0.8, "time/publishing_s": 0.05, "time/saving_s": 0.1,
    }  # fmt: skip
    if step % 6 == 0:
        looked = {"eval/greedy": right, "eval/greedy/near": right, "eval/greedy/far": right * 0.9}
        measured |= looked | {"time/evaluating_s": 0.6}
    return measured


def _rollout(chance: random.Random, step: int, group: int, index: int) -> Rollout:
    city, more = CITIES[(step + group) % len(CITIES)], 10 + 7 * group
    size = 600 + 137 * (step + group)
    right = chance.random() < step / STEPS
    name = f"{step}-0-{group}"
    entries = list(_entries(chance, city, size, more, step, index if (step, group) == (2, 1) else -1, right))
    rewards = {"right": float(right), "brief": round(chance.uniform(0.4, 0.9), 2)}
    one = Rollout(
        f"city-{city}-{more}",
        Ledger(tuple(entries)),
        StopReason.FEEDBACK_DONE,
        name,
        index,
        rewards=rewards,
        weighed=rewards["right"] + 0.1 * rewards["brief"],
        kind="far" if more > 20 else "near",
    )
    if (step, group, index) == (2, 0, 3):
        reason = "server 'atlas' is down: connection refused"
        return replace(one, ledger=Ledger(tuple(entries[:3])), stop=StopReason.TOOL_FAILED, rewards={}, reason=reason)
    return replace(one, timeline=tuple(_spans(chance, entries)), timing={"generating": 1.2, "calling": 0.4})


def _spans(chance: random.Random, entries: Iterable[Entry]) -> Iterator[Span]:
    at = 0.0
    for entry in entries:
        phases = {
            Author.POLICY: ("queueing", "generating"),
            Author.TOOL: ("calling",),
            Author.FEEDBACK: ("interacting",),
        }
        for phase in phases.get(entry.author, ()):
            spent = round(
                {"queueing": 0.03, "generating": 0.5, "calling": 0.2}.get(phase, 0.05) * (0.5 + chance.random()), 4
            )
            yield Span(phase, round(at, 4), spent)
            at += spent


def _entries(
    chance: random.Random, city: str, size: int, more: int, step: int, odd: int, right: bool
) -> Iterator[Entry]:
    question = f"How many people live in {city} if {more} more come?" if odd != 0 else f"Say {HOSTILE} to {city}."
    asked = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})
    yield Entry(Author.TASK, _ids(_chat(asked) + "<|im_start|>assistant\n"), asked, source="cities.jsonl:7")
    calls = (ToolCall("c1", "look_up", json.dumps({"name": city, "year": 2024})),)
    yield _turn(chance, step, "", calls, REASONING)
    found = {"city": city, "people": size, "source": "atlas"}
    yield _answer("look_up", json.dumps(found), (Text(json.dumps(found)),), 0.012)
    if more > 20:
        draw = (ToolCall("c2", "draw_bars", json.dumps({"values": [size, more], "labels": [city, "more"]})),)
        yield _turn(chance, step, "", draw, "")
        yield _answer("draw_bars", "A chart of 2 bars.", (Text("A chart of 2 bars."), Image(_bars(size, more))), 0.31)
    said = f"{size} live there, and {more} come.\n#### {size + more if right else size - more}"
    yield _turn(chance, step, HOSTILE if odd == 0 else said, (), "")
    told = "That is right." if right else "That is not right. Look again at who comes."
    heard = ({"role": "user", "content": told},)
    yield Entry(Author.FEEDBACK, (), heard, reward=float(right), source="judge", outcomes=(Outcome.OK,))


def _turn(chance: random.Random, step: int, said: str, calls: tuple[ToolCall, ...], reasoning: str) -> Entry:
    written = f"<think>{reasoning}</think>\n" if reasoning else ""
    written += said + "".join(
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>' for call in calls
    )
    ids = _ids(written + "<|im_end|>")
    message = {"role": "assistant", "content": said} | ({"reasoning_content": reasoning} if reasoning else {})
    logprobs = tuple(round(-chance.expovariate(2 + step / 3), 4) for _ in ids)
    return Entry(Author.POLICY, ids, (message,), logprobs, version=step - 1, cached=8, stop="stop", calls=calls)


def _answer(name: str, text: str, parts: tuple[Part, ...], elapsed_s: float) -> Entry:
    shown = sum(isinstance(part, Image) for part in parts)
    message: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "name": name, "content": text}
    info = {"tools": [{"name": name, "outcome": "ok", "elapsed_s": elapsed_s}]}
    ids = _ids(f"\n{_chat(({**message, 'content': text + PAD * shown},))}<|im_start|>assistant\n")
    if shown:
        message["content"] = [{"type": "text", "text": text}, *[{"type": "image"}] * shown]
    pad = tokenizer().token_to_id(PAD)
    spans = tuple((at, at + 1) for at, id in enumerate(ids) if id == pad)
    return Entry(
        Author.TOOL, ids, (message,), parts=parts, spans=spans, widths=(WIDTH,) * shown,
        outcomes=(Outcome.OK,), reward=0.0, source=name, info=info,
    )  # fmt: skip


def _credits(rollouts: Iterable[Rollout]) -> Iterator[Weighed]:
    by_group: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_group.setdefault(rollout.group, []).append(rollout)
    for group in by_group.values():
        rewards = [one.reward or 0.0 for one in group]
        mean = sum(rewards) / len(group)
        for one, reward in zip(group, rewards, strict=True):
            mask, worth = one.ledger.expanded.mask, reward - mean
            yield Weighed(one.name, tuple(worth * own for own in mask), tuple(map(float, mask)))


def _chat(messages: Iterable[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)


@cache
def tokenizer() -> Tokenizer:
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
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(one) for one in ("<think>", "</think>", "<tool_call>", "</tool_call>", PAD)])
    return tokenizer


@cache
def _bars(*values: int) -> bytes:
    picture = Picture.new("RGB", (320, 180), "white")
    draw = ImageDraw.Draw(picture)
    for place, value in enumerate(values):
        draw.rectangle((50 + place * 120, 165 - 140 * value / max(values), 130 + place * 120, 165), fill="#1c5fc4")
    saved = io.BytesIO()
    picture.save(saved, "PNG")
    return saved.getvalue()
