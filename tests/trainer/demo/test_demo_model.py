"""The demo's model is spoken to exactly, is made alike each time, and begins to learn within a few steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.demo.demonstrate import Writer
from trainer.demo.facts.demo import school
from trainer.demo.facts.model import build, tokenizer
from trainer.demo.facts.task import CITIES, PEOPLE, TOOLS, problem, problems
from trainer.demo.folder import digest, made
from trainer.demo.warm import Recipe, Rows, warm
from trainer.ledger import Author
from trainer.model import load_model
from trainer.template import Template, probe

SHORT = Recipe(clean=12, habit=2, batch=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def writer(folder: Path) -> Writer:
    return Writer(Template.load(folder), TOOLS)


def test_the_template_passes_the_probe_and_its_parser_is_chosen(folder: Path) -> None:
    template = Template.load(folder)
    assert probe(template).ok
    assert template.parser.name == "hermes"


def test_what_is_encoded_is_decoded_again(writer: Writer) -> None:
    tokens = writer.template.tokens
    for one in islice(problems(1), 50):
        ledger = writer.demonstration(one, Random(1))
        assert tokens.encode(tokens.decode(ledger.ids)) == ledger.ids
        for text in (str(one.task.messages[0]["content"]), "Größe 12 \u2603 <|im_end|> assistant\n"):
            assert tokens.decode(tokens.encode(tokens.fenced(text))) == text


def test_names_and_digits_are_one_token_each(writer: Writer) -> None:
    tokens = writer.template.tokens
    assert all(len(tokens.encode(name)) == 1 for name in (*PEOPLE, *CITIES))
    assert len(tokens.encode("60482")) == 5


def test_no_token_crosses_from_the_prompt_into_the_turn(writer: Writer) -> None:
    one = problem(1, 0, "hop")
    ledger = writer.demonstration(one, Random(0))
    for start, entry in zip(ledger.starts, ledger.entries, strict=True):
        if entry.author is Author.POLICY:
            assert writer.template.tokens.decode(ledger.ids[start - 1 : start]) == "assistant\n"


def test_the_tokenizer_is_the_same_each_time() -> None:
    assert tokenizer().backend_tokenizer.to_str() == tokenizer().backend_tokenizer.to_str()


def test_the_folder_loads_as_any_other_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert sum(weight.numel() for weight in model.parameters()) < 200_000


def test_a_few_steps_lower_the_loss(folder: Path, one_thread: None) -> None:
    losses: list[float] = []
    warm(load_model(folder), school(folder), Recipe(clean=25, habit=0), lambda step, of, loss: losses.append(loss))
    assert losses[-1] < 0.6 * losses[0]


def test_the_skill_alone_is_what_the_whole_recipe_goes_through(folder: Path, one_thread: None) -> None:
    whole, parts = load_model(folder), load_model(folder)
    warm(whole, school(folder), SHORT)
    warm(parts, school(folder), replace(SHORT, habit=0))
    skilled = {name: weight.clone() for name, weight in parts.state_dict().items()}
    warm(parts, school(folder), replace(SHORT, clean=0))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name])
    assert any(not torch.equal(weight, skilled[name]) for name, weight in whole.state_dict().items())


def test_another_seed_makes_another_model_and_other_demonstrations(tmp_path: Path, one_thread: None) -> None:
    def steps(seed: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        losses: list[float] = []
        recipe = replace(SHORT, seed=seed)
        model = load_model(build(tmp_path / str(seed), seed))
        start = {name: weight.clone() for name, weight in model.state_dict().items()}
        warm(model, school(tmp_path / str(seed)), recipe, lambda *told: losses.append(told[2]))
        return start, losses

    (one, first), (other, second) = steps(0), steps(1)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not set(first) & set(second)


def test_only_what_the_policy_wrote_is_learned(writer: Writer) -> None:
    ledger = writer.demonstration(problem(1, 0, "move"), Random(0))
    rows = Rows.of([ledger, writer.demonstration(problem(1, 0, "fact"), Random(0))])
    learned = writer.template.tokens.decode(rows.ids[0][rows.mask[0]].tolist())
    assert learned.count("<tool_call>") == 3
    assert "How many" not in learned
    assert "<|im_start|>" not in learned
    assert rows.mask[1].sum() < rows.mask[0].sum()


def test_a_recipe_is_followed_once_and_gives_the_same_weights_again(tmp_path: Path, one_thread: None) -> None:
    heard: list[tuple[int, int]] = []
    first = made(SHORT, tmp_path / "one", lambda step, of, loss: heard.append((step, of)))
    again = made(SHORT, tmp_path / "one", lambda step, of, loss: heard.append((-step, of)))
    assert first == again
    assert heard == [(step, 14) for step in range(1, 15)]
    other = made(SHORT, tmp_path / "two")
    mine, theirs = load_model(first).state_dict(), load_model(other).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert digest(SHORT) != digest(Recipe())
    assert [one.name for one in (tmp_path / "one").iterdir()] == [first.name]
