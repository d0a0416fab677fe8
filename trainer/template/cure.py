"""Finds the setting that makes a chat template fit for training, by trying those that change how it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer.parse.hermes import Hermes
from trainer.template.chat_template import ChatTemplate
from trainer.template.errors import TemplateError
from trainer.template.template import Template

CURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("`template.sanity: ignore_strippable`", {"sanity": "ignore_strippable"}),
    ("`template.history: inference_template`", {"history": "inference_template"}),
    ("`template.chat_template_kwargs: {enable_thinking: false}`", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("`template.calls: text`", {"calls": "text"}),
)
"""Settings as they are written in a run file, and their values; those that change least come first."""


def find_cure(template: Template, works: Callable[[Template], bool]) -> str:
    """The first setting with which the template works; empty if there is none."""
    return next((text for text, changes in CURES if _works(template, changes, works)), "")


def _works(template: Template, changes: dict[str, Any], works: Callable[[Template], bool]) -> bool:
    settings, old = replace(template.settings, **changes), template.chat
    if settings == template.settings:
        return False
    kwargs = settings.chat_template_kwargs or {}
    try:
        chat = ChatTemplate(old.hf_tokenizer, old.tokenizer, settings.chat_template, kwargs, settings.calls)
        parser = Hermes({}) if settings.calls == "text" else template.parser
        return works(Template(chat, parser, template.stop_ids, settings, template.image_processor))
    except TemplateError:
        return False
