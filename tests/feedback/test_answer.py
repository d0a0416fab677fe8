"""What an interaction may return, and what is said of the rest."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as Pictures

from gateway.feedback.toolset import FeedbackToolset
from gateway.types import Feedback, Image, Outcome, Task, Text
from tests.feedback.interactions import Recorder, answers


def png() -> bytes:
    out = io.BytesIO()
    Pictures.new("RGB", (2, 2), "red").save(out, format="PNG")
    return out.getvalue()


async def heard(value: Any) -> Feedback:
    async with FeedbackToolset({"one": Recorder({"returns": value})}) as toolset, toolset.open(Task()) as session:
        return await session.feedback(answers("a"))


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
async def test_a_turn_may_leave_out_its_end_and_a_missing_score_is_calculated(
    value: Any, score: float, done: bool
) -> None:
    feedback = await heard(value)
    assert (feedback.message, feedback.score, feedback.done, feedback.outcome) == ("Well.", score, done, Outcome.OK)


@pytest.mark.parametrize(
    "said",
    [
        [
            {"type": "text", "text": "See:"},
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
            },
        ],
        [Text("See:"), Image(png())],
    ],
)
async def test_an_interaction_may_answer_with_pictures_in_their_place(said: Any) -> None:
    feedback = await heard((False, said, 0.0, {}))
    assert feedback.parts == (Text("See:"), Image(png()))


async def test_an_interaction_may_answer_with_a_tool_response() -> None:
    response = SimpleNamespace(text="See.", image=[Pictures.new("RGB", (2, 2))], video=None)
    feedback = await heard((False, response, 0.0, {}))
    assert [type(part) for part in feedback.parts] == [Image, Text]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "Recorder.generate_response returned a NoneType"),
        ("Well.", "Recorder.generate_response returned a str"),
        ((True,), "a tuple of 1"),
        (("False", "Well.", 1.0, {}), "'False' for should_terminate"),
        ((True, "Well.", "1.0", {}), "Recorder gave '1.0' for a score"),
        ((True, "Well.", float("nan"), {}), "nan for a score"),
        ((True, "Well.", [1], {}), "[1] for a score"),
        ((True, "Well.", 1.0, [1]), "a list for metadata"),
    ],
)
async def test_what_is_no_turn_is_refused_with_the_class_and_the_reason(value: Any, reason: str) -> None:
    feedback = await heard(value)
    assert feedback.outcome is Outcome.UNAVAILABLE
    assert reason in str(feedback.reason)


async def test_a_picture_that_cannot_be_read_is_left_out_with_a_note() -> None:
    feedback = await heard((False, Image(b"\x89PNG\r\n\x1a\n broken"), 0.0, {}))
    assert "left out" in feedback.message
