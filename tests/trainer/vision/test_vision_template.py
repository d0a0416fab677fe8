"""Chat templates with images: placeholders, placement, and media that cannot be shown."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_messages import tool_messages as tool_messages
from gateway.errors import ConfigError
from gateway.types import Image, Text, ToolCall, ToolResult, ToolSpec
from tests.trainer.policy_scripts import HERMES, make_template
from tests.trainer.vision.vision_models import picture, seeing_model
from trainer.ledger import Author, Entry, Ledger, Message
from trainer.rollout.settings import TemplateSettings
from trainer.setup import load_template
from trainer.template import Settings, Template, TemplateError, probe
from trainer.template.media_layout import MediaLayout, has_media
from trainer.vision.family import family_from_config

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
    template = Template.load(folder)
    assert template.image_processor is not None
    template.image_processor.family.image_layout = where
    return template


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


def test_probe_finds_a_template_that_drops_images(sees: Path, dropping: Path) -> None:
    assert probe(Template.load(sees)).is_ok
    with pytest.raises(TemplateError, match=r"(?s)the template drops images of tools"):
        probe(Template.load(dropping)).raise_if_failed()
    assert probe(Template.load(dropping), tools=False).is_ok
    assert probe(looking(dropping, "user_message")).is_ok


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
    shipped = load_template(folder, TemplateSettings(chat_template="qwen2_vl"))
    assert shipped.parser.name == "hermes" and probe(shipped).is_ok


def test_text_model_reads_that_an_image_was_omitted() -> None:
    heard = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    laid = make_template(HERMES).prepare_media([*SHOWN, {"role": "user", "content": [text("hear"), heard]}])
    note = "[image left out: this model reads text alone]"
    assert [row["content"] for row in laid.messages] == [
        f"x\n{note}\ny",
        f"{note}\n{note}",
        "hear\n[audio left out: this model reads text alone]",
    ]
    assert laid.widths == (0, 0, 0, 0)


def test_release_of_transformers_that_is_too_old_to_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.vision_utils", None)
    monkeypatch.delitem(sys.modules, "trainer.vision.qwen_vl", raising=False)
    with pytest.raises(ConfigError, match=r"models that see need transformers 5\.17 or newer, and this is 5\."):
        family_from_config({"model_type": "qwen2_vl"})
