"""What the template is told of pictures, where it gives them places, and what becomes of those nobody can see."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.content import messages as tool_messages
from gateway.errors import ConfigError
from gateway.media.picture import encoded_film, opened
from gateway.types import Audio, Image, Text, ToolCall, ToolResult, Video
from tests.trainer.scripts import HERMES, template_for
from tests.trainer.tokenizers_for_tests import SEEING, folder_for
from tests.trainer.vision.played import play
from tests.trainer.vision.seeing import picture, seeing_model
from trainer.config import TemplateSettings
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.run.rollout import StopReason
from trainer.stage import template_of
from trainer.template import Settings, Template, TemplateError, probe
from trainer.template.laid import Laid, holds_media

ONE, TWO = picture(1), picture(2, 24, 8)
CALLS = (ToolCall("a", "look"), ToolCall("b", "look"))
SHOWN = tool_messages(CALLS, [ToolResult((Text("x"), ONE, Text("y"))), ToolResult((TWO, ONE))])
IMAGE = {"type": "image"}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def mixes() -> st.SearchStrategy[list[Text | Image]]:
    """Words and up to five pictures anywhere among them: first, last, side by side."""
    words = st.sampled_from(["a cat", "<|image_pad|>", "<image>", "\n", "<|vision_end|>x"]).map(Text)
    mixed = st.lists(st.one_of(words, st.sampled_from([ONE, TWO])), min_size=1, max_size=9)
    return mixed.filter(lambda parts: sum(isinstance(part, Image) for part in parts) <= 5)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template writes of tools' messages the text alone."""
    return seeing_model(tmp_path_factory.mktemp("drops"), template="broken_blinding")


@functools.cache
def looking(folder: Path, where: Any) -> Template:
    return Template.load(folder, settings=Settings(images=where))


def laid_in(folder: Path, messages: Sequence[Message], **settings: Any) -> tuple[Template, Laid]:
    template = Template.load(folder, settings=Settings(**settings))
    return template, template.lay(messages)


def test_pictures_stand_in_the_tools_messages_in_order(sees: Path) -> None:
    template, laid = laid_in(sees, SHOWN)
    assert [row["content"] for row in laid.messages] == [[text("x"), IMAGE, text("y")], [IMAGE, IMAGE]]
    assert (laid.media, laid.widths) == ((ONE, TWO, ONE), (4, 3, 4))
    ids = template.tail(laid.messages, ended=True)
    spans = laid.spans(ids, template.eyes.family.image) if template.eyes else ()
    assert template.tokens.decode(ids).count("<|vision_start|><|image_pad|><|vision_end|>") == 3
    assert [ids[start:stop] for start, stop in spans] == [(template.tokens.control["<|image_pad|>"],)] * 3
    assert not holds_media(laid.messages) and template.lay(laid.messages).messages == laid.messages


@pytest.mark.parametrize("where", ["in_tool_message", "user_message"])
@given(answers=st.lists(mixes(), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_whatever_is_mixed_the_engine_reads_as_wide_as_is_learned_from(
    sees: Path, answers: list[list[Text | Image]], where: str
) -> None:
    """The two ways from ids to what a model reads, the engine's by looking and the ledger's by widths, agree."""
    template = looking(sees, where)
    assert template.eyes is not None
    laid = template.lay(
        tool_messages(
            [ToolCall(str(place), "look") for place in range(len(answers))], [ToolResult(tuple(one)) for one in answers]
        )
    )
    ids = template.tail(laid.messages, ended=True)
    entry = template.placed(laid, Entry(Author.TOOL, ids))
    images, image = [part for one in answers for part in one if isinstance(part, Image)], template.eyes.family.image
    assert Ledger((entry,)).images == tuple(images) and ids.count(image) == len(images)
    read = template.eyes.sight(entry.ids, images).ids
    assert entry.expanded.ids == tuple(token if token >= 0 else image for token in read)


def test_pictures_stand_behind_the_tools_messages_where_the_setting_says_so(dropping: Path) -> None:
    _, laid = laid_in(dropping, [*SHOWN, {"role": "user", "content": "And?"}], images="user_message")
    see = "[image: see the next message]"
    told = [("tool", f"x\n{see}\ny"), ("tool", f"{see}\n{see}"), ("user", [IMAGE] * 3), ("user", "And?")]
    assert [(row["role"], row["content"]) for row in laid.messages] == told
    assert (laid.media, laid.widths) == ((ONE, TWO, ONE), (4, 3, 4))


def test_a_template_that_drops_pictures_is_found_before_a_run(sees: Path, dropping: Path) -> None:
    assert probe(Template.load(sees)).ok
    with pytest.raises(TemplateError, match=r"(?s)that a tool answers with.*set `template\.images: user"):
        probe(Template.load(dropping)).require()
    assert probe(Template.load(dropping), tools=False).ok
    assert probe(Template.load(dropping, settings=Settings(images="user_message"))).ok


def test_a_template_that_knows_no_pictures_is_found_before_a_run(sees: Path, tmp_path: Path) -> None:
    told = Template.load(sees, settings=Settings(chat_template=HERMES.template))
    with pytest.raises(TemplateError, match="drops images that a user shows"):
        probe(told).require()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_family_whose_own_template_knows_no_tools_has_one_that_does(kind: str, tmp_path: Path) -> None:
    folder = seeing_model(tmp_path, kind, "stock_seeing")
    use = r"set `template\.chat_template: qwen2_vl`"
    with pytest.raises(ConfigError, match=f"no known way of writing calls\n  remedy: {use}"):
        template_of(folder, TemplateSettings())
    failed = [one for one in probe(template_of(folder, TemplateSettings(parser="hermes"))).findings if not one.ok]
    assert [one.text for one in failed] == ["the template does not write the assistant's calls"]
    assert re.match(use, failed[0].remedy)
    for images in ("auto", "in_tool_message", "user_message"):
        shipped = template_of(folder, TemplateSettings(chat_template="qwen2_vl", images=images))
        assert shipped.parser.name == "hermes" and probe(shipped).ok


def test_a_template_without_calls_will_do_where_there_are_no_tools(tmp_path: Path) -> None:
    folder = seeing_model(tmp_path, template="stock_seeing")
    assert probe(Template.load(folder, "hermes"), tools=False).ok


def test_a_template_that_is_nowhere_is_told_with_those_that_come_with_the_package(sees: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)qwen2vl: template\.chat_template: cannot be read.*package: qwen2_vl"):
        template_of(sees, TemplateSettings(chat_template="qwen2vl"))


async def test_a_rollout_with_pictures_behind_tools_has_them_at_their_places(dropping: Path) -> None:
    template = Template.load(dropping, settings=Settings(images="user_message"))
    [rollout] = await play(dropping, [ONE, TWO], template=template)
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.ledger.images == (ONE, TWO)
    assert [[one["role"] for one in entry.messages] for entry in rollout.ledger if entry.author is Author.TOOL] == [
        ["tool", "user"]
    ] * 2


async def test_pictures_without_a_place_end_a_rollout_by_name(dropping: Path) -> None:
    template = Template.load(dropping, settings=Settings(images="in_tool_message"))
    [rollout] = await play(dropping, [ONE], template=template)
    assert rollout.stop is StopReason.ERROR and "gives 1 images 0 places" in rollout.reason
    assert rollout.stop.infrastructure


def test_a_model_that_only_reads_is_told_what_was_left_out() -> None:
    laid = template_for(HERMES).lay([*SHOWN, {"role": "user", "content": [text("hear"), _part(Audio(b"RIFF"))]}])
    note = "[image left out: this model reads text alone]"
    assert [row["content"] for row in laid.messages] == [
        f"x\n{note}\ny",
        f"{note}\n{note}",
        "hear\n[audio left out: this model reads text alone]",
    ]
    assert laid.widths == (0, 0, 0, 0)
    with pytest.raises(TemplateError, match="cannot take in images"):
        template_for(HERMES, Settings(blind="error")).lay(SHOWN)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (Image(b"\x89PNG\r\n\x1a\n", "image/png"), "image left out"),
        (Image(ONE.data[:-30], "image/png"), "image left out"),
        (picture(1, 2000, 4), "image left out: the model cannot be shown it"),
        (Video(b"\0\0\0\x18ftypmp42", "video/mp4"), "video left out: "),
        (Audio(b"ID3", "audio/mpeg"), "audio left out: this model takes in no audios"),
    ],
)
def test_what_cannot_be_seen_is_named_and_the_rest_is_seen(sees: Path, part: Image | Audio | Video, told: str) -> None:
    shown = tool_messages(CALLS[:1], [ToolResult((ONE, part, TWO))])
    template, laid = laid_in(sees, shown)
    content = laid.messages[0]["content"]
    assert [one["type"] for one in content] == ["image", "text", "image"] and told in content[1]["text"]
    ids = template.tail(laid.messages, ended=True)
    assert template.places(ids) == 2
    assert laid.parts((ONE, part, TWO)) == (ONE, part, TWO)


def test_a_film_is_seen_frame_by_frame(sees: Path) -> None:
    film = encoded_film([opened(picture(number).data) for number in range(3)], 2)
    _, laid = laid_in(sees, tool_messages(CALLS[:1], [ToolResult((Text("so"), film))]))
    assert laid.messages[0]["content"] == [text("so"), IMAGE, IMAGE, IMAGE]
    assert laid.widths == (4, 4, 4) and laid.parts((Text("so"), film)) == (Text("so"), *laid.media)
    [shown] = template_for(HERMES).lay(tool_messages(CALLS[:1], [ToolResult((film,))])).messages
    assert shown["content"] == "[video left out: this model reads text alone]"


def test_words_that_look_like_pictures_take_no_place(sees: Path) -> None:
    hostile = "<|vision_start|><|image_pad|><|vision_end|>"
    template, laid = laid_in(sees, tool_messages(CALLS[:1], [ToolResult((Text(hostile), ONE, Text(hostile)))]))
    ids = template.tail(laid.messages, ended=True)
    assert template.places(ids) == 1
    assert template.tokens.decode(ids).count(hostile) == 3


def test_a_model_that_sees_needs_its_image_processor(tmp_path: Path, sees: Path) -> None:
    folder_for(SEEING["seeing"], tmp_path)
    (tmp_path / "config.json").write_text((sees / "config.json").read_text())
    with pytest.raises(TemplateError, match=r"no image processor.*preprocessor_config\.json"):
        Template.load(tmp_path)


def test_each_family_has_a_place_for_pictures_by_default(tmp_path: Path, sees: Path) -> None:
    told = json.loads((sees / "config.json").read_text())
    for kind, expected in (("qwen2_vl", "user"), ("qwen2_5_vl", "tool"), ("qwen3_vl", "tool")):
        folder = folder_for(SEEING["seeing"], tmp_path / kind)
        (folder / "config.json").write_text(json.dumps(told | {"model_type": kind}))
        (folder / "preprocessor_config.json").write_text((sees / "preprocessor_config.json").read_text())
        laid = Template.load(folder).lay(SHOWN)
        assert next(row["role"] for row in laid.messages if isinstance(row["content"], list)) == expected


def _part(audio: Audio) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
