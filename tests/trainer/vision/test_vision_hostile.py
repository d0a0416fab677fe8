"""Whatever a tool answers with, the rollout goes on: what cannot be seen is told in its place, and no more is lost."""

from __future__ import annotations

from pathlib import Path

from gateway.media.admit import LOST
from gateway.types import Image, Outcome, Part, Text, ToolResult
from tests.drawn import SVG, bomb, moving, truncated
from tests.trainer.vision.played import Looking, lesson_of, play
from tests.trainer.vision.seeing import picture
from trainer.learn.settings import AlgorithmSettings
from trainer.ledger import Author
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.run.rollout import StopReason
from trainer.steps import OF_CALLS

SEEN = picture(1)
MANY = tuple(picture(number, 8, 8) for number in range(2, 51))
"""With the one that is seen, fifty."""
HOSTILE: dict[str, tuple[tuple[Part, ...], str, int, int]] = {
    "bomb": ((Image(bomb()),), "[image left out: 31623x31623 pixels, more than 64000000]", 0, 1),
    "truncated": ((Image(truncated()),), "[image left out: not a readable picture: ", 0, 1),
    "drawing": ((Image(SVG, "image/svg+xml"),), "[image left out: SVG is a drawing in words", 0, 1),
    "animated": ((Image(moving("GIF")),), "[the image is animated: this is how it begins]", 1, 0),
    "many": (MANY, "[34 more images left out: at most 16 of one result are shown]", 15, 34),
}
"""What is answered, what the policy reads of it, how many pictures of it are seen, and how many are not."""
GRPO = AlgorithmSettings()


async def look(kind: str) -> ToolResult:
    """Shows what nobody should."""
    return ToolResult((Text("Here:"), SEEN, *HOSTILE[kind][0], Text("seen.")))


async def test_what_is_hostile_is_told_in_its_place_and_the_rollout_goes_on_to_the_gradient(sees: Path) -> None:
    asked = Looking(*(("look", f'{{"kind": "{kind}"}}') for kind in HOSTILE))
    rollouts = await play(sees, look, n=2, stepper=asked)
    for rollout in rollouts:
        assert (rollout.stop, rollout.reason, len(rollout.turns)) == (StopReason.DONE, "", len(HOSTILE) + 1)
        answers = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
        for answer, (kind, (_, told, seen, lost)) in zip(answers, HOSTILE.items(), strict=True):
            words = [part.text for part in answer.parts if isinstance(part, Text)]
            assert (words[0], words[-1], answer.outcomes) == ("Here:", "seen.", (Outcome.OK,)), kind
            assert len(words) == 3 and words[1].startswith(told) and told in str(answer.messages), kind
            assert answer.parts[1] == SEEN and len(answer.spans) == len(answer.widths) == 1 + seen, kind
            assert answer.info[OF_CALLS][0].get("metrics", {}) == ({LOST: lost} if lost else {}), kind
    policy = Policy.load(sees, UpdateSettings())
    assert Learner(policy, GRPO, exact=True).learn(lesson_of(rollouts, GRPO))["mismatch/max"] < 1e-5
