"""Chat templates with images: placeholders, placement, and media that cannot be shown."""

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

from gateway.chat_messages import tool_messages as tool_messages
from gateway.errors import ConfigError
from gateway.media.image import encode_video, open_image
from gateway.types import Audio, Image, Text, ToolCall, ToolResult, ToolSpec, Video
from tests.trainer.policy_scripts import HERMES, make_template
from tests.trainer.tokenizer_families import VISION_FAMILIES, save_tokenizer_folder
from tests.trainer.vision.vision_models import picture, seeing_model
from tests.trainer.vision.vision_rollouts import play
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import TemplateSettings
from trainer.setup import load_template
from trainer.template import Settings, Template, TemplateError, probe
from trainer.template.media_layout import MediaLayout, has_media

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


def laid_in(folder: Path, messages: Sequence[Message], **settings: Any) -> tuple[Template, MediaLayout]:
    template = Template.load(folder, settings=Settings(**settings))
    return template, template.prepare_media(messages)


def test_tool_images_are_in_order_in_the_tool_messages(sees: Path) -> None:
    template, laid = laid_in(sees, SHOWN)
    assert [row["content"] for row in laid.messages] == [[text("x"), IMAGE, text("y")], [IMAGE, IMAGE]]
    assert (laid.media, laid.widths) == ((ONE, TWO, ONE), (4, 3, 4))
    ids = template.encode_tail(laid.messages, ended=True)
    spans = laid.find_spans(ids, template.image_processor.family.image_id) if template.image_processor else ()
    assert template.tokenizer.decode(ids).count("<|vision_start|><|image_pad|><|vision_end|>") == 3
    assert [ids[start:stop] for start, stop in spans] == [(template.tokenizer.control_ids["<|image_pad|>"],)] * 3
    assert not has_media(laid.messages) and template.prepare_media(laid.messages).messages == laid.messages


@pytest.mark.parametrize("where", ["in_tool_message", "user_message"])
@given(answers=st.lists(mixes(), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_mixed_content_has_the_same_widths_in_engine_and_training(
    sees: Path, answers: list[list[Text | Image]], where: str
) -> None:
    """The two ways from ids to what a model reads, the engine's by looking and the ledger's by widths, agree."""
    template = looking(sees, where)
    assert template.image_processor is not None
    laid = template.prepare_media(
        tool_messages(
            [ToolCall(str(place), "look") for place in range(len(answers))], [ToolResult(tuple(one)) for one in answers]
        )
    )
    ids = template.encode_tail(laid.messages, ended=True)
    entry = template.attach_media(laid, Entry(Author.TOOL, ids))
    images, image = (
        [part for one in answers for part in one if isinstance(part, Image)],
        template.image_processor.family.image_id,
    )
    assert Ledger((entry,)).images == tuple(images) and ids.count(image) == len(images)
    read = template.image_processor.prepare_prompt(entry.ids, images).ids
    assert entry.expanded.ids == tuple(token if token >= 0 else image for token in read)


def test_tool_images_follow_the_tool_messages_if_configured(dropping: Path) -> None:
    _, laid = laid_in(dropping, [*SHOWN, {"role": "user", "content": "And?"}], images="user_message")
    see = "[image: see the next message]"
    told = [("tool", f"x\n{see}\ny"), ("tool", f"{see}\n{see}"), ("user", [IMAGE] * 3), ("user", "And?")]
    assert [(row["role"], row["content"]) for row in laid.messages] == told
    assert (laid.media, laid.widths) == ((ONE, TWO, ONE), (4, 3, 4))


def test_probe_finds_a_template_that_drops_images(sees: Path, dropping: Path) -> None:
    assert probe(Template.load(sees)).is_ok
    with pytest.raises(
        TemplateError, match=r"(?s)the template drops images of tools.*set `template\.images: user_message`"
    ):
        probe(Template.load(dropping)).raise_if_failed()
    assert probe(Template.load(dropping), tools=False).is_ok
    assert probe(Template.load(dropping, settings=Settings(images="user_message"))).is_ok


def test_probe_finds_a_template_without_images(sees: Path, tmp_path: Path) -> None:
    told = Template.load(sees, settings=Settings(chat_template=HERMES.template))
    with pytest.raises(TemplateError, match="the template drops images of users"):
        probe(told).raise_if_failed()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_family_without_a_tool_template_gets_the_shipped_one(kind: str, tmp_path: Path) -> None:
    folder = seeing_model(tmp_path, kind, "stock_seeing")
    use = r"set `template\.chat_template: qwen2_vl`"
    with pytest.raises(TemplateError, match=f"does not write the assistant's calls\n  remedy: {use}"):
        load_template(folder, TemplateSettings(), [ToolSpec("look_up")])
    assert probe(load_template(folder, TemplateSettings()), tools=False).is_ok
    failed = [one for one in probe(load_template(folder, TemplateSettings(parser="hermes"))).findings if not one.is_ok]
    assert [one.detail for one in failed] == ["the chat template does not write the assistant's calls"]
    assert re.match(use, failed[0].remedy)
    for images in ("auto", "in_tool_message", "user_message"):
        shipped = load_template(folder, TemplateSettings(chat_template="qwen2_vl", images=images))
        assert shipped.parser.name == "hermes" and probe(shipped).is_ok


def test_template_without_calls_is_accepted_without_tools(tmp_path: Path) -> None:
    folder = seeing_model(tmp_path, template="stock_seeing")
    assert probe(Template.load(folder, "hermes"), tools=False).is_ok


def test_unknown_template_is_reported_with_the_shipped_ones(sees: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)qwen2vl: template\.chat_template: cannot be read.*package: qwen2_vl"):
        load_template(sees, TemplateSettings(chat_template="qwen2vl"))


async def test_images_behind_tool_messages_have_their_spans(dropping: Path) -> None:
    template = Template.load(dropping, settings=Settings(images="user_message"))
    [rollout] = await play(dropping, [ONE, TWO], template=template)
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.ledger.images == (ONE, TWO)
    assert [[one["role"] for one in entry.messages] for entry in rollout.ledger if entry.author is Author.TOOL] == [
        ["tool", "user"]
    ] * 2


async def test_images_without_a_placeholder_end_the_rollout_with_a_reason(dropping: Path) -> None:
    template = Template.load(dropping, settings=Settings(images="in_tool_message"))
    [rollout] = await play(dropping, [ONE], template=template)
    assert rollout.stop is StopReason.ERROR and "writes 0 placeholders for 1 images" in rollout.reason
    assert rollout.stop.is_infrastructure


def test_text_model_reads_that_an_image_was_omitted() -> None:
    laid = make_template(HERMES).prepare_media(
        [*SHOWN, {"role": "user", "content": [text("hear"), _part(Audio(b"RIFF"))]}]
    )
    note = "[image left out: this model reads text alone]"
    assert [row["content"] for row in laid.messages] == [
        f"x\n{note}\ny",
        f"{note}\n{note}",
        "hear\n[audio left out: this model reads text alone]",
    ]
    assert laid.widths == (0, 0, 0, 0)
    with pytest.raises(TemplateError, match="does not support images"):
        make_template(HERMES, Settings(blind="error")).prepare_media(SHOWN)


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
def test_unsupported_media_are_named_and_images_are_shown(sees: Path, part: Image | Audio | Video, told: str) -> None:
    shown = tool_messages(CALLS[:1], [ToolResult((ONE, part, TWO))])
    template, laid = laid_in(sees, shown)
    content = laid.messages[0]["content"]
    assert [one["type"] for one in content] == ["image", "text", "image"] and told in content[1]["text"]
    ids = template.encode_tail(laid.messages, ended=True)
    assert template.count_images(ids) == 2
    assert laid.replace_media((ONE, part, TWO)) == (ONE, part, TWO)


def test_video_is_shown_as_frames(sees: Path) -> None:
    film = encode_video([open_image(picture(number).data) for number in range(3)], 2)
    _, laid = laid_in(sees, tool_messages(CALLS[:1], [ToolResult((Text("so"), film))]))
    assert laid.messages[0]["content"] == [text("so"), IMAGE, IMAGE, IMAGE]
    assert laid.widths == (4, 4, 4) and laid.replace_media((Text("so"), film)) == (Text("so"), *laid.media)
    [shown] = make_template(HERMES).prepare_media(tool_messages(CALLS[:1], [ToolResult((film,))])).messages
    assert shown["content"] == "[video left out: this model reads text alone]"


def test_text_that_looks_like_an_image_token_is_no_placeholder(sees: Path) -> None:
    hostile = "<|vision_start|><|image_pad|><|vision_end|>"
    template, laid = laid_in(sees, tool_messages(CALLS[:1], [ToolResult((Text(hostile), ONE, Text(hostile)))]))
    ids = template.encode_tail(laid.messages, ended=True)
    assert template.count_images(ids) == 1
    assert template.tokenizer.decode(ids).count(hostile) == 3


def test_vision_model_needs_its_image_processor(tmp_path: Path, sees: Path) -> None:
    save_tokenizer_folder(VISION_FAMILIES["seeing"], tmp_path)
    (tmp_path / "config.json").write_text((sees / "config.json").read_text())
    with pytest.raises(TemplateError, match=r"no image processor.*preprocessor_config\.json"):
        Template.load(tmp_path)


def test_every_family_has_a_default_image_placement(tmp_path: Path, sees: Path) -> None:
    told = json.loads((sees / "config.json").read_text())
    for kind, expected in (("qwen2_vl", "user"), ("qwen2_5_vl", "tool"), ("qwen3_vl", "tool")):
        folder = save_tokenizer_folder(VISION_FAMILIES["seeing"], tmp_path / kind)
        (folder / "config.json").write_text(json.dumps(told | {"model_type": kind}))
        (folder / "preprocessor_config.json").write_text((sees / "preprocessor_config.json").read_text())
        laid = Template.load(folder).prepare_media(SHOWN)
        assert next(row["role"] for row in laid.messages if isinstance(row["content"], list)) == expected


def _part(audio: Audio) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
