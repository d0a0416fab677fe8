"""What a reward function sees: one rollout that is over, and of its words as an answer only the policy's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from gateway.feedback.base import plain_text
from gateway.types import Image
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.run.rollout import Rollout, StopReason
from trainer.task import Task

TRUNCATED = (StopReason.LENGTH_TURN, StopReason.LENGTH_ROLLOUT)
ENDED = (StopReason.DONE, StopReason.TOOL_DONE, StopReason.FEEDBACK_DONE, StopReason.STEP_DONE)


@dataclass(frozen=True, slots=True)
class Attempt:
    """To be read, not changed: the ledger and the row are the run's own."""

    task: Task
    rollout: Rollout
    success: bool | None = None
    """Whether the component that tells success reached its mark; None for that component itself."""

    @property
    def answer(self) -> str:
        """The words of the policy's last turn, without reasoning and calls; nothing where it was cut off.

        Of a turn that a plug-in wrote into, what the policy wrote after that.
        """
        turns = self.turns
        if not turns or turns[-1].stop != "stop":
            return ""
        last = turns[-1]
        said = "\n".join(plain_text(message.get("content")) for message in last.messages)
        if "own" not in last.info:
            return said
        # Of the turn's words, which were told whole, those that the policy's own text ends with as well.
        pairs = zip(reversed(said), reversed(str(last.info["own"])), strict=False)
        return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]

    @property
    def truth(self) -> Any:
        """The task's right answer."""
        return self.task.truth

    @property
    def columns(self) -> Mapping[str, Any]:
        """The whole row as it came."""
        return self.task.columns

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole chat; what tools and feedback said stands there too, by roles of their own; pictures as places."""
        return self.rollout.ledger.messages

    @property
    def images(self) -> tuple[Image, ...]:
        """What the policy was shown at those places, in order."""
        return self.rollout.ledger.images

    @property
    def ledger(self) -> Ledger:
        """The last one, as there may be `rollout.earlier` ones."""
        return self.rollout.ledger

    @property
    def turns(self) -> tuple[Entry, ...]:
        """The policy's, over all ledgers."""
        return self.rollout.turns

    @property
    def infos(self) -> Mapping[str, Any]:
        """What plug-ins and interactions passed on."""
        return self.rollout.infos

    @property
    def rewards(self) -> Mapping[str, float]:
        """What came from the gateway, summed by kind: `call`, `feedback`, and `end` for last rewards."""
        return self.rollout.rewards

    @property
    def stop(self) -> StopReason:
        return self.rollout.stop

    @property
    def truncated(self) -> bool:
        """The tokens ran out before the policy was done."""
        return self.stop in TRUNCATED

    @property
    def ended(self) -> bool:
        """The policy, a tool, an interaction or a plug-in ended the rollout, and no limit did."""
        return self.stop in ENDED

    def given(self, author: Author) -> tuple[float, ...]:
        """Of each of the policy's turns, what it was scored by tools, or by feedback."""
        scores: list[float] = []
        for ledger in self.rollout.ledgers:
            for entry in ledger:
                if entry.author is Author.POLICY:
                    scores.append(0.0)
                elif entry.author is author and entry.reward is not None and scores:
                    scores[-1] += entry.reward
        return tuple(scores)
