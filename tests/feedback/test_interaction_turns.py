"""Tests of the return values of interactions: accepted forms, and errors for others."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.types import Feedback, Image, Outcome, Task, Text
from tests.feedback.interactions import Recorder, make_chat
from tests.sample_images import png


async def get_feedback(value: Any) -> Feedback:
    async with FeedbackToolset({"one": Recorder({"returns": value})}) as toolset, toolset.open(Task()) as session:
        return await session.feedback(make_chat("a"))


@pytest.mark.parametrize(
    ("value", "score", "done"),
    [
        ((True, "Well.", 1.0, {}), 1.0, True),
        ((False, "Well.", 1, None), 1.0, False),
        ((0, "Well.", True), 1.0, False),
        ((True, "Well.", None, {}), 0.25, True),
        ((False, "Well."), 0.25, False),
    ],
)
async def test_score_and_metadata_may_be_missing_and_the_score_is_then_calculated(
    value: Any, score: float, done: bool
) -> None:
    feedback = await get_feedback(value)
    assert (feedback.message, feedback.score, feedback.done, feedback.outcome) == ("Well.", score, done, Outcome.OK)


@pytest.mark.parametrize(
    "reply",
    [
        [
            {"type": "text", "text": "See:"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"}},
        ],
        [Text("See:"), Image(png())],
    ],
)
async def test_a_reply_may_have_images_among_text(reply: Any) -> None:
    feedback = await get_feedback((False, reply, 0.0, {}))
    assert feedback.parts == (Text("See:"), Image(png()))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "Recorder.generate_response returned a NoneType"),
        ("Well.", "Recorder.generate_response returned a str"),
        ((True,), "a tuple of 1"),
        (("False", "Well.", 1.0, {}), "'False' for should_terminate"),
        ((True, "Well.", "1.0", {}), "Recorder returned '1.0' as a score"),
        ((True, "Well.", float("nan"), {}), "nan as a score"),
        ((True, "Well.", 1.0, [1]), "a list for metadata"),
    ],
)
async def test_an_invalid_turn_is_reported_with_class_and_reason(value: Any, reason: str) -> None:
    feedback = await get_feedback(value)
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert reason in str(feedback.reason)
