"""`mtrl-train export`: from checkpoints of one process and of ranks to a folder that transformers and peft load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from tests.trainer.distributed.rank_pools import random_batch, running_ranks, save_wider_model
from tests.trainer.policy.tiny_policies import tiny_model
from tests.trainer.train.jobs import demo_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.cli import app
from trainer.distributed.lead import LeadPolicy, LeadUpdater
from trainer.policy.policy import Policy
from trainer.policy.settings import LoraSettings, UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.train.checkpoint import BestCheckpoint, Checkpoints

IDS = torch.tensor([[3, 7, 11, 2, 40, 9]])
UPDATES = {"full": UpdateSettings(lr=1e-2), "lora": UpdateSettings(lr=1e-2, lora=LoraSettings(rank=4))}


def export(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == code and not isinstance(done.exception, Exception), done.output
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 with a tokenizer, that training starts from."""
    folder = tmp_path_factory.mktemp("start")
    tiny_model(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder)
    for pattern in ("tokenizer*", "chat_template*"):
        for file in demo_model().glob(pattern):
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def runs(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A run with one checkpoint for each kind of training, of one process and of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs = {}
    with running_ranks(2, folder) as channel:
        for kind, update in UPDATES.items():
            alone, together = Policy.load(start, update), LeadPolicy.lead(channel, start, update)
            updaters = (
                PolicyUpdater(alone, AlgorithmSettings(), exact=True),
                LeadUpdater(together, AlgorithmSettings(), exact=True, temperature=1.0),
            )
            for updater, policy, ranks in zip(updaters, (alone, together), (1, 2), strict=True):
                updater.train_step(random_batch(tiny_model(tie_word_embeddings=True), 0))
                runs[f"{kind}-{ranks}"] = write_run(folder / f"{kind}-{ranks}", policy, start)
    yield runs
    torch.set_num_threads(threads)


def write_run(run: Path, policy: Policy, start: Path) -> Path:
    """A run's folder with what `export` reads of it."""
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"model": str(start)}))

    def write(folder: Path):  # type: ignore[no-untyped-def]
        for file in start.glob("tokenizer*"):
            shutil.copyfile(file, folder / file.name)
        return policy.save(folder)

    checkpoints = Checkpoints(run)
    checkpoints.save(1, {}, write)
    checkpoints.wait()
    return run


def save_three_steps(run: Path, policy: Policy) -> Checkpoints:
    checkpoints = Checkpoints(run)
    checkpoints.best_step = 1
    for step in (1, 2, 3):
        checkpoints.save(step, {}, policy.save)
    return checkpoints


def test_best_step_of_a_run_is_exported_by_name(start: Path, tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    save_three_steps(run, Policy.load(start, UPDATES["full"]))
    text = export(run, "--best", "--out", tmp_path / "none", code=2)
    assert "no best step is known" in text and "evaluation.every" in text
    BestCheckpoint(run).record(0, 0.4)
    assert "no step was better than the model before training" in export(
        run, "--best", "--out", tmp_path / "none", code=2
    )
    BestCheckpoint(run).record(1, 0.5)
    assert "after 1 step" in export(run, "--best", "--out", tmp_path / "best")
    latest = export(run, "--out", tmp_path / "latest")
    assert "after 3 steps" in latest and "step 1 was better in the run's evaluations (0.500); --best" in latest
    assert not (tmp_path / "none").exists()


def test_the_model_card_says_what_was_trained_and_how_it_was_evaluated(start: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Policy.load(start, UPDATES["full"]), start)
    settings = {
        "model": "/data/models/Base-0.5B", "data": "rows.jsonl", "n": 8, "algorithm": {"name": "dapo"},
        "update": {"lr": 1e-5, "lora": {"rank": 16}}, "reward": {"components": {"right": {}, "style": {}}},
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps({"model": str(start), "settings": settings}))
    rates = {"sampled_before": 0.1, "greedy_before": 0.0, "sampled": 0.9, "greedy": 1.0}
    (run / "eval").mkdir()
    comparison = run / "eval" / "comparison.json"
    comparison.write_text(json.dumps({**rates, "tasks": 300, "held_out": True, "step": 1}))
    export(run, "--out", tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "library_name: transformers" in card and "starting from `Base-0.5B`" in card and "/data" not in card
    assert "| reward | `right, style` |" in card and "| update.lora.rank | `16` |" in card
    assert "300 held-out tasks" in card and "| greedy | 0.000 | 1.000 |" in card
    comparison.write_text(json.dumps({**rates, "tasks": 300, "held_out": True, "step": 7}))
    export(run, "--out", tmp_path / "other")
    assert "held-out" not in (tmp_path / "other" / "README.md").read_text(), "another step was evaluated"


def trained_logits(run: Path, start: Path, kind: str) -> torch.Tensor:
    """The logits of the policy that was saved, with its merged weights in the model's own dtype."""
    policy = Policy.load(start, UPDATES[kind])
    policy.resume(run / "checkpoints/000001")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    model.load_state_dict({name: value.to(torch.bfloat16) for name, value in policy.weights.items()})
    return logits(model)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = model.eval()(IDS).logits
    return computed


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", UPDATES)
def test_transformers_loads_the_export_and_computes_the_trained_models_logits(
    runs: dict[str, Path], start: Path, tmp_path: Path, kind: str, ranks: int
) -> None:
    run, out = runs[f"{kind}-{ranks}"], tmp_path / "exported"
    assert "after 1 step, in bfloat16" in export(run, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(model), trained_logits(run, start, kind))
    assert not torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(start)))
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(start).get_vocab()
    assert {file.name for file in out.iterdir()} >= {"config.json", "generation_config.json", "model.safetensors"}
    assert not list(tmp_path.glob(".*"))
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "other accounts may read all files or none"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # By peft itself.
@pytest.mark.parametrize("ranks", [1, 2])
def test_peft_loads_the_exported_adapters(runs: dict[str, Path], start: Path, tmp_path: Path, ranks: int) -> None:
    run, out = runs[f"lora-{ranks}"], tmp_path / "adapter"
    assert "the adapters, after 1 step" in export(run / "checkpoints/000001", "--adapter", "--out", out)
    assert not (out / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(start)
    loaded = PeftModel.from_pretrained(base, str(out)).merge_and_unload()
    assert torch.allclose(logits(loaded), trained_logits(run, start, "lora"), atol=0.1)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(start)


def test_mistakes_are_named_before_anything_is_written(runs: dict[str, Path], start: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "out", runs["full-2"]
    save_wider_model(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun/checkpoints/.writing/shards").mkdir(parents=True)
    lost = shutil.copytree(run, tmp_path / "lost") / "checkpoints/000001/shards/__1_0.distcp"
    lost.unlink()
    for arguments, problem in (
        ((tmp_path / "nowhere",), "there is no such folder"),
        ((tmp_path / "empty",), "neither a run nor a whole checkpoint"),
        ((tmp_path / "begun",), "the run has no checkpoint yet"),
        ((tmp_path / "begun/checkpoints/.writing",), "it has no state.json, which is written last"),
        ((tmp_path / "lost/checkpoints/000001",), "__1_0.distcp is missing"),
        ((run, "--adapter"), "there are no adapters"),
        ((run, "--model", tmp_path / "other"), "another model: intermediate_size is 32 there, not 48"),
        ((runs["lora-2"], "--model", tmp_path / "other"), "size mismatch"),
        ((run, "--model", tmp_path / "empty"), "there is no config.json here"),
    ):
        assert problem in export(*arguments, "--out", out, code=2), problem
        assert not out.exists() and not list(tmp_path.glob(".*"))
    assert "the folder exists already" in export(run, "--out", start, code=2)
