"""The demo's model: tokenizer, template, deterministic creation and first training steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtrl_plugins.demo.facts.facts_demo import build_model
from mtrl_plugins.demo.model_cache import find_or_build_model, recipe_digest
from mtrl_plugins.demo.warm_start import Recipe
from trainer.model import load_model
from trainer.template import Template, probe

SHORT = Recipe(skill_steps=12, habit_steps=2, batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("demo"))


def test_template_passes_the_probe_and_its_parser_is_chosen(folder: Path) -> None:
    template = Template.load(folder)
    assert probe(template).is_ok
    assert template.parser.name == "hermes"


def test_demo_model_folder_loads_as_any_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert sum(weight.numel() for weight in model.parameters()) < 200_000


def test_demo_model_is_built_once_and_deterministically(tmp_path: Path, one_thread: None) -> None:
    heard: list[tuple[int, int]] = []
    first = find_or_build_model(SHORT, tmp_path / "one", lambda step, of, loss: heard.append((step, of)))
    again = find_or_build_model(SHORT, tmp_path / "one", lambda step, of, loss: heard.append((-step, of)))
    assert first == again
    assert heard == [(step, 14) for step in range(1, 15)]
    other = find_or_build_model(SHORT, tmp_path / "two")
    mine, theirs = load_model(first).state_dict(), load_model(other).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert recipe_digest(SHORT) != recipe_digest(Recipe())
    assert [one.name for one in (tmp_path / "one").iterdir()] == [first.name]
