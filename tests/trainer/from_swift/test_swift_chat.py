"""What a scheduler made of a chat is told from the chat: cuts lie between ids, and pictures stand in their place."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Image
from trainer.config import RolloutLimits
from trainer.engine.base import Sampling
from trainer.steps import Opening
from trainer.swift.alike import Known, left_out, next_step
from trainer.swift.chat import laid_out, request_of
from trainer.swift.protocol import RolloutInferRequest
from trainer.task import Task

ASKED = [{"role": "user", "content": "Go."}]
PIECES = ("ab", "c", "def", " ", "\n")


def words(ids: Sequence[int]) -> str:
    return "".join(PIECES[id] for id in ids)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).map(tuple), st.data())
def test_what_stays_and_what_is_inserted_are_the_text_that_the_scheduler_left(
    ids: tuple[int, ...], data: st.DataObject
) -> None:
    said = words(ids)
    kept = said[: data.draw(st.integers(0, len(said)))] + data.draw(st.sampled_from(["", "no", "cd", " "]))
    request = RolloutInferRequest([*ASKED, {"role": "assistant", "content": kept or " "}])
    known, step = next_step(Known(ASKED, 0, "", said, ids), request, words)
    assert step.keep is not None and words(ids[: step.keep]) + step.insert == (kept or " ")
    assert known.begun == (kept or " ") and not step.messages and step.history is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4), st.data())
def test_masks_fall_on_the_turns_that_were_written_and_on_nothing_else(
    turns: list[tuple[int, ...]], data: st.DataObject
) -> None:
    masks = [data.draw(st.lists(st.booleans(), min_size=len(turn), max_size=len(turn))) for turn in turns]
    returned: list[tuple[int, bool]] = []
    for turn, mask in zip(turns, masks, strict=True):
        returned += [*zip(turn, mask, strict=True), (9, data.draw(st.booleans()))]
    spans = left_out(turns, returned, frozenset())
    for turn, mask, found in zip(turns, masks, spans, strict=True):
        left = [any(start <= place < stop for start, stop in found) for place in range(len(turn))]
        assert left == [not learned for learned in mask]


def test_pictures_stand_where_the_scheduler_says_and_are_given_to_it_beside_the_text() -> None:
    picture = Image(b"\x89PNG", "image/png")
    part = {"type": "image", "image": picture}
    task = Task("t", ({"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]},))
    opening = Opening("k", task, (), None, RolloutLimits(), Sampling())  # type: ignore[arg-type]
    request = request_of(opening)
    assert request.messages == [{"role": "user", "content": "<image>What is it?"}]
    assert request.images == ["data:image/png;base64,iVBORw=="]
    request.messages += [{"role": "assistant", "content": "zoom"}, {"role": "user", "content": "Here: <image>."}]
    request.images.append("data:image/png;base64,AAAA")
    before = Known([{"role": "user", "content": "<image>What is it?"}], 1, "", "zoom", (1,))
    _, step = next_step(before, request, words)
    new = {"type": "image", "image": "data:image/png;base64,AAAA"}
    text = [{"type": "text", "text": "Here: "}, new, {"type": "text", "text": "."}]
    assert step.messages == ({"role": "user", "content": text},) == laid_out(request.messages[2:], request.images[1:])
