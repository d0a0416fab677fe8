"""Questions reworded by a chat endpoint: a text that loses a value, or tells the answer, is not taken."""

from __future__ import annotations

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.task_maker import questions as rewording_module
from mtrl_plugins.task_maker.chain import Chain, Step
from mtrl_plugins.task_maker.questions import Rewording
from mtrl_plugins.task_maker.values import Value
from tests.plugins.task_maker.chat_server import ChatHandler

CHAIN = Chain((Step("find", {"item": 412}, {}, (412,), {"box": 77}),), "train", answer=Value(77, "box", None, ("box",)))
QUESTION = "Find the box of an item: item 412. What is the box? Answer with #### and the value."


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("Which box holds item 412? End with #### and it.", True),
        ("Which box holds item 412?", True),
        ("Which box holds the item? ####", False),
        ("Is item 412 in box 77? ####", False),
        ("Which box holds item 4123? ####", False),
        ("Which box holds item 412, or else item 413? ####", False),
        ("", False),
    ],
)
async def test_only_texts_that_keep_values_and_do_not_tell_are_taken(
    chat_url: str, text: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatHandler, "reply", lambda self, body: text)
    rewording = Rewording(chat_url, "any")
    question = await rewording.reword(QUESTION, CHAIN)
    await rewording.aclose()
    assert question.startswith(text) if taken else question == QUESTION
    assert "####" in question
    assert (rewording.taken, rewording.refused + rewording.failed) == (int(taken), int(not taken))


async def test_endpoint_that_does_not_answer_is_told_before_tasks_are_made(chat_url: str) -> None:
    with pytest.raises(ConfigError, match=r"no question can be reworded: .* answered with status 400") as raised:
        await Rewording(chat_url, "any").check()
    assert raised.value.field == "--reword-url"


async def test_endpoint_that_stops_answering_is_not_asked_for_ever(
    chat_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewording_module, "MOST_FAILED", 2)
    rewording = Rewording(chat_url, "any")
    for _ in range(2):
        assert await rewording.reword(QUESTION, CHAIN) == QUESTION
    monkeypatch.setattr(ChatHandler, "reply", lambda self, body: "Which box holds item 412? ####")
    assert await rewording.reword(QUESTION, CHAIN) == QUESTION and rewording.failed == 3
    await rewording.aclose()
