"""Hostile images from tools: replaced by a message, and the rollout continues."""

from __future__ import annotations

from pathlib import Path

from gateway.media.media_filter import REFUSED_METRIC
from gateway.types import Image, Outcome, Part, Text, ToolResult
from tests.sample_images import SVG, animation, decompression_bomb, truncated_png
from tests.trainer.vision.vision_models import picture
from tests.trainer.vision.vision_rollouts import Looking, lesson_of, play
from trainer.algorithms.settings import AlgorithmSettings
from trainer.ledger import Author
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import CALLS_INFO

SEEN = picture(1)
MANY = tuple(picture(number, 8, 8) for number in range(2, 51))
"""With the one that is seen, fifty."""
HOSTILE: dict[str, tuple[tuple[Part, ...], str, int, int]] = {
    "bomb": ((Image(decompression_bomb()),), "[image left out: 31623x31623 pixels, more than 64000000]", 0, 1),
    "truncated": ((Image(truncated_png()),), "[image left out: not a readable image: ", 0, 1),
    "drawing": ((Image(SVG, "image/svg+xml"),), "[image left out: SVG images are not supported", 0, 1),
    "animated": ((Image(animation("GIF")),), "[the image is animated: this is its first frame]", 1, 0),
    "many": (MANY, "[34 more images left out: at most 16 of one result are shown]", 15, 34),
}
"""What is answered, what the policy reads of it, how many pictures of it are seen, and how many are not."""
GRPO = AlgorithmSettings()


async def look(kind: str) -> ToolResult:
    """Shows what nobody should."""
    return ToolResult((Text("Here:"), SEEN, *HOSTILE[kind][0], Text("seen.")))


async def test_hostile_image_is_replaced_by_a_message_and_the_rollout_trains(sees: Path) -> None:
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
            assert answer.info[CALLS_INFO][0].get("metrics", {}) == ({REFUSED_METRIC: lost} if lost else {}), kind
    policy = Policy.load(sees, UpdateSettings())
    assert PolicyUpdater(policy, GRPO, exact=True).train_step(lesson_of(rollouts, GRPO))["mismatch/max"] < 1e-5
