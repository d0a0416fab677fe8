"""The demo's model: tokenizer, template, deterministic creation and first training steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtrl_plugins.demo.facts.facts_demo import build_model, build_warm_start
from mtrl_plugins.demo.facts.facts_tasks import CITIES, PEOPLE, TOOLS, draw_problem, draw_problems
from mtrl_plugins.demo.model_cache import find_or_build_model, recipe_digest
from mtrl_plugins.demo.warm_start import DemonstrationWriter, PaddedLedgers, Recipe, warm_start
from trainer.ledger import Author
from trainer.model import load_model
from trainer.template import Template, probe

SHORT = Recipe(skill_steps=12, habit_steps=2, batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def writer(folder: Path) -> DemonstrationWriter:
    return DemonstrationWriter(Template.load(folder), TOOLS)


def test_template_passes_the_probe_and_its_parser_is_chosen(folder: Path) -> None:
    template = Template.load(folder)
    assert probe(template).is_ok
    assert template.parser.name == "hermes"


def test_encoding_round_trips(writer: DemonstrationWriter) -> None:
    tokens = writer.template.tokenizer
    for one in islice(draw_problems(1), 50):
        ledger = writer.write(one, Random(1))
        assert tokens.encode(tokens.decode(ledger.ids)) == ledger.ids
        for text in (str(one.task.messages[0]["content"]), "Größe 12 \u2603 <|im_end|> assistant\n"):
            assert tokens.decode(tokens.encode(tokens.fence(text))) == text


def test_names_and_digits_are_single_tokens(writer: DemonstrationWriter) -> None:
    tokens = writer.template.tokenizer
    assert all(len(tokens.encode(name)) == 1 for name in (*PEOPLE, *CITIES))
    assert len(tokens.encode("60482")) == 5


def test_no_token_spans_prompt_and_turn(writer: DemonstrationWriter) -> None:
    one = draw_problem(1, 0, "hop")
    ledger = writer.write(one, Random(0))
    for start, entry in zip(ledger.starts, ledger.entries, strict=True):
        if entry.author is Author.POLICY:
            assert writer.template.tokenizer.decode(ledger.ids[start - 1 : start]) == "assistant\n"


def test_demo_model_folder_loads_as_any_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert sum(weight.numel() for weight in model.parameters()) < 200_000


def test_few_steps_lower_the_loss(folder: Path, one_thread: None) -> None:
    losses: list[float] = []
    warm_start(
        load_model(folder),
        build_warm_start(folder),
        Recipe(skill_steps=25, habit_steps=0),
        lambda step, of, loss: losses.append(loss),
    )
    assert losses[-1] < 0.6 * losses[0]


def test_skill_stage_is_part_of_the_whole_recipe(folder: Path, one_thread: None) -> None:
    whole, parts = load_model(folder), load_model(folder)
    warm_start(whole, build_warm_start(folder), SHORT)
    warm_start(parts, build_warm_start(folder), replace(SHORT, habit_steps=0))
    skilled = {name: weight.clone() for name, weight in parts.state_dict().items()}
    warm_start(parts, build_warm_start(folder), replace(SHORT, skill_steps=0))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name])
    assert any(not torch.equal(weight, skilled[name]) for name, weight in whole.state_dict().items())


def test_seed_changes_model_and_demonstrations(tmp_path: Path, one_thread: None) -> None:
    def steps(seed: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        losses: list[float] = []
        recipe = replace(SHORT, seed=seed)
        model = load_model(build_model(tmp_path / str(seed), seed))
        start = {name: weight.clone() for name, weight in model.state_dict().items()}
        warm_start(model, build_warm_start(tmp_path / str(seed)), recipe, lambda *told: losses.append(told[2]))
        return start, losses

    (one, first), (other, second) = steps(0), steps(1)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not set(first) & set(second)


def test_demonstrations_train_policy_tokens_only(writer: DemonstrationWriter) -> None:
    ledger = writer.write(draw_problem(1, 0, "move"), Random(0))
    rows = PaddedLedgers.from_ledgers([ledger, writer.write(draw_problem(1, 0, "fact"), Random(0))])
    learned = writer.template.tokenizer.decode(rows.ids[0][rows.mask[0]].tolist())
    assert learned.count("<tool_call>") == 3
    assert "How many" not in learned
    assert "<|im_start|>" not in learned
    assert rows.mask[1].sum() < rows.mask[0].sum()


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
