"""Tests how a scheduler's changes to its chat become steps: kept ids, inserted text, masks and images."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Image
from mtrl_plugins.swift.protocol import RolloutInferRequest
from mtrl_plugins.swift.stepper import ChatState, build_request, find_masked_spans, next_step, to_template_messages
from trainer.engine.base import Sampling
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import RolloutStart
from trainer.rollout.task import Task

CHAT = [{"role": "user", "content": "Go."}]
PIECES = ("ab", "c", "def", " ", "\n")


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[id] for id in ids)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).map(tuple), st.data())
def test_kept_ids_and_insert_give_the_schedulers_text(ids: tuple[int, ...], data: st.DataObject) -> None:
    text = decode(ids)
    kept = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from(["", "no", "cd", " "]))
    request = RolloutInferRequest([*CHAT, {"role": "assistant", "content": kept or " "}])
    state, step = next_step(ChatState(CHAT, 0, "", text, ids), request, decode)
    assert step.keep_ids is not None and decode(ids[: step.keep_ids]) + step.insert == (kept or " ")
    assert state.prefix == (kept or " ") and not step.messages and step.history is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4), st.data())
def test_masks_apply_only_to_policy_turns(turns: list[tuple[int, ...]], data: st.DataObject) -> None:
    masks = [data.draw(st.lists(st.booleans(), min_size=len(turn), max_size=len(turn))) for turn in turns]
    returned: list[tuple[int, bool]] = []
    for turn, mask in zip(turns, masks, strict=True):
        returned += [*zip(turn, mask, strict=True), (9, data.draw(st.booleans()))]
    spans = find_masked_spans(turns, returned, frozenset())
    for turn, mask, turn_spans in zip(turns, masks, spans, strict=True):
        is_masked = [any(start <= place < stop for start, stop in turn_spans) for place in range(len(turn))]
        assert is_masked == [not is_trained for is_trained in mask]


def test_images_are_placed_at_their_marks() -> None:
    picture = Image(b"\x89PNG", "image/png")
    part = {"type": "image", "image": picture}
    task = Task("t", ({"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]},))
    opening = RolloutStart("k", task, (), None, RolloutLimits(), Sampling(), None)  # type: ignore[arg-type]
    request = build_request(opening)
    assert request.messages == [{"role": "user", "content": "<image>What is it?"}]
    assert request.images == ["data:image/png;base64,iVBORw=="]
    request.messages += [{"role": "assistant", "content": "zoom"}, {"role": "user", "content": "Here: <image>."}]
    request.images.append("data:image/png;base64,AAAA")
    before = ChatState([{"role": "user", "content": "<image>What is it?"}], 1, "", "zoom", (1,))
    _, step = next_step(before, request, decode)
    new = {"type": "image", "image": "data:image/png;base64,AAAA"}
    text = [{"type": "text", "text": "Here: "}, new, {"type": "text", "text": "."}]
    assert (
        step.messages
        == ({"role": "user", "content": text},)
        == to_template_messages(request.messages[2:], request.images[1:])
    )
