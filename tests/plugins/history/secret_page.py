"""A task that no context of its run holds: a page names somebody, and the question comes once that page is gone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from mtrl_plugins.demo.facts.facts_demo import build_network, build_tokenizer
from mtrl_plugins.demo.facts.facts_tasks import PEOPLE
from mtrl_plugins.demo.warm_start import SFT, build_batch
from mtrl_plugins.history.compaction import SUMMARY, add_text
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import Step, ToolsAndFeedback, Turn
from trainer.template import Template

NAMES = PEOPLE[:3]
OPENING: tuple[Message, ...] = ({"role": "user", "content": "1?"},)
REQUEST = "0?"
FILLER = "7" * 24


def page(name: str) -> Message:
    """The page with the name."""
    return {"role": "user", "content": f"{name} {FILLER}"}


QUESTION: Message = {"role": "user", "content": f"{FILLER}2?"}


class Pages(ToolsAndFeedback):
    """Shows the page, then the question."""

    def check_finished(self, turn: Turn) -> bool | StopReason:
        return StopReason.DONE if turn.messages[-2] == QUESTION else False

    async def step(self, turn: Turn) -> Step:
        is_read = len(turn.messages) > 2 or SUMMARY in turn.messages[0]["content"]
        return Step(messages=(QUESTION if is_read else page(turn.task.truth),))


def names_it(attempt: Any) -> float:
    """Whether the answer to the question is the name of the page."""
    return float(attempt.ended and attempt.answer.strip() == attempt.truth)


def build_model(folder: Path, steps: int = 80) -> None:
    """A model that was shown the form: its summaries name anybody, and it answers with its summary's name."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    model = build_network(len(tokenizer), tokenizer.get_vocab()["<|im_end|>"])
    template, draw = Template.load(folder), Random(0)
    updater = PolicyUpdater(Policy(model, UpdateSettings(lr=3e-3)), SFT, exact=True, deterministic=True)

    def policy(text: str) -> Entry:
        ids = (*template.tokenizer.encode(text), template.stop_ids[0])
        return Entry(Author.POLICY, ids, ({"role": "assistant", "content": text},), logprobs=(0.0,) * len(ids))

    def feedback(message: Message) -> Entry:
        return Entry(Author.FEEDBACK, template.encode_tail([message], ended=True))

    def write() -> list[Ledger]:
        name, guess = draw.choice(NAMES), draw.choice(NAMES)
        asked = add_text([page(name)], REQUEST)[0]
        first = [Entry(Author.TASK, template.encode_prompt(OPENING)), policy("1"), feedback(asked), policy(guess)]
        opening = Entry(Author.TASK, template.encode_prompt(add_text(OPENING, SUMMARY + guess)))
        return [Ledger((*first,)), Ledger((opening, policy("1"), feedback(QUESTION), policy(guess)))]

    for _ in range(steps):
        updater.train_step(build_batch([ledger for _ in range(8) for ledger in write()]))
    model.save_pretrained(folder)
