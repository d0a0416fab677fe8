"""Tests on-policy distillation: the KL to a teacher, from its folder or from a server, teaches a student."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from transformers import AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM

from tests.trainer.cli_data import RunCommand
from tests.trainer.engine_sglang.engine_harness import hosting
from tests.trainer.engine_sglang.model_server import ModelServer
from tests.trainer.model_folders import save_tiny_model
from tests.trainer.policy.test_logprobs import gemma2
from tests.trainer.policy.tiny_policies import example_batch, model_gradient, tiny_model
from tests.trainer.train.jobs import demo_model
from tests.trainer.train.trainings import read_run_metrics, write_config
from trainer.algorithms.settings import AlgorithmSettings, ReferenceSettings
from trainer.algorithms.train_batch import TrainBatch
from trainer.model import load_model
from trainer.policy.logprobs import LogprobReader
from trainer.policy.policy import Policy
from trainer.policy.ranks import OneRank
from trainer.policy.reference import find_token_mismatch
from trainer.policy.settings import PolicyError, UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.pretrained import load_tokenizer
from trainer.template.tokenizer import FencedTokenizer
from trainer.train.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")


def make_teacher(folder: Path, seed: int = 1) -> Path:
    """A model of another shape and with other weights than the student."""
    config = tiny_model().config
    config.intermediate_size = 64
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def distilling(top_k: int = 0, **reference: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"kl": {"reference": {"timeout_s": 30, **reference}, "top_k": top_k}})


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serves from a thread of its own: the trainer's thread waits for the answers."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(hosting(app)) as url:
        yield url


def plain_kl(student: PreTrainedModel, teacher: PreTrainedModel, batch: TrainBatch, top_k: int) -> torch.Tensor:
    """The mean KL over trained tokens from all logits, with all but the teacher's first `top_k` tokens as one, and with
    them those that the student does not have."""
    values = []
    for sequence in batch.sequences:
        own_LV, other_LV = (model(torch.tensor([sequence.ids])).logits[0, :-1].double() for model in (student, teacher))
        own_LV, other_LV = own_LV.log_softmax(-1), other_LV.detach().log_softmax(-1)
        is_in_LV = torch.zeros_like(other_LV).bool().scatter(1, other_LV.topk(min(top_k, 50)).indices, True)[:, :50]
        other_LV = other_LV[:, :50]
        rests = [1 - torch.where(is_in_LV, logprobs.exp(), 0).sum(-1) for logprobs in (own_LV, other_LV)]
        own_L, other_L = (rest.clamp(min=1e-9) for rest in rests)
        kl_L = torch.where(is_in_LV, own_LV.exp() * (own_LV - other_LV), 0).sum(-1) + own_L * (own_L / other_L).log()
        values.append(kl_L[torch.tensor(sequence.mask[1:])])
    return torch.cat(values).mean()


@pytest.mark.parametrize("make", [tiny_model, gemma2], ids=["prefixes shared", "each sequence alone"])
@pytest.mark.parametrize("top_k", [1, 7, 50, 99])
def test_kl_over_likely_tokens_is_that_of_the_formula_and_exact_over_all(top_k: int, make: Any, tmp_path: Path) -> None:
    folder, batch = make_teacher(tmp_path), example_batch(make())
    teacher, plain = load_model(folder), make()
    expected = plain_kl(plain, teacher, batch, top_k)
    expected.backward()  # type: ignore[no-untyped-call]
    chunked = {"logits_chunk": 4, "micro_batch_tokens": 24, "max_grad_norm": 1e9}
    student = Policy(make(), UpdateSettings.model_validate(chunked))
    settings = distilling(top_k, model=str(folder)).model_copy(update={"aggregate": "token"})
    gradients: list[torch.Tensor] = []
    step = student.step
    student.step = lambda: (gradients.append(model_gradient(student.model)), step())[1]  # type: ignore[func-returns-value, method-assign]
    batch = replace(batch, rewards=(0.0,) * len(batch.rewards))
    metrics = PolicyUpdater(student, settings, exact=True).train_step(batch)
    assert metrics["kl/reference"] == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradients[0], model_gradient(plain), atol=2e-5)
    assert top_k >= 50 or expected.item() < plain_kl(plain, teacher, batch, 50).item()


def test_likely_tokens_may_be_those_of_the_model_without_its_adapters() -> None:
    student = Policy(tiny_model(), UpdateSettings.model_validate({"lr": 1e-2, "lora": {"rank": 4}}))
    settings = AlgorithmSettings.model_validate({"kl": {"coefficient": 0.1, "top_k": 5}})
    updater = PolicyUpdater(student, settings, exact=True)
    kl = [updater.train_step(example_batch(tiny_model()))["kl/reference"] for _ in range(2)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-4


def test_likely_tokens_that_the_student_lacks_count_with_all_others(tmp_path: Path) -> None:
    torch.manual_seed(3)
    teacher, batch = Qwen3ForCausalLM(tiny_model(vocab_size=64).config), example_batch(tiny_model())
    teacher.save_pretrained(tmp_path)
    student = Policy(tiny_model(), UpdateSettings())
    metrics = PolicyUpdater(student, distilling(20, model=str(tmp_path)), exact=True).train_step(batch)
    assert metrics["kl/reference"] == pytest.approx(plain_kl(tiny_model(), teacher, batch, 20).item(), abs=1e-4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"))


def small_student(folder: Path) -> Policy:
    """A student with the vocabulary of a teacher."""
    size = len(AutoTokenizer.from_pretrained(folder))
    return Policy(tiny_model(vocab_size=size), UpdateSettings(lr=1e-2))


def student_batch(folder: Path) -> TrainBatch:
    """Rollouts of that student before its first step."""
    return example_batch(tiny_model(vocab_size=len(AutoTokenizer.from_pretrained(folder))))


class Reports(OneRank):
    """A rank that remembers what it reported."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def report(self, stage: str) -> None:
        self.stages.append(stage)


@pytest.mark.parametrize("top_k", [0, 6])
def test_local_and_served_teacher_agree(top_k: int, teacher: Path) -> None:
    trained = []
    with serving(ModelServer(teacher).app()) as url:
        for reference in ({"model": str(teacher)}, {"url": url}):
            student = small_student(teacher)
            student.ranks = Reports()
            updater = PolicyUpdater(student, distilling(top_k, **reference), exact=True)
            metrics = [updater.train_step(student_batch(teacher)) for _ in range(3)]
            trained.append((metrics, student.weights))
            assert student.ranks.stages[0].startswith("pass 1 of the reference"), "a slow teacher is no stuck rank"
    (local, weights), (served, others) = trained
    assert abs(local[0]["kl/reference"]) > 0.01
    for one, other in zip(local, served, strict=True):
        assert one.keys() == other.keys() and one == pytest.approx(other, abs=1e-5)
    assert max(float((weights[name] - value).abs().max()) for name, value in others.items()) < 1e-5


def test_dead_teacher_ends_the_step_before_weights_change(teacher: Path) -> None:
    student = small_student(teacher)
    with serving(ModelServer(teacher).app()) as url:
        updater = PolicyUpdater(student, distilling(url=url), exact=True)
        updater.train_step(student_batch(teacher))
    before = {name: value.clone() for name, value in student.weights.items()}
    with pytest.raises(PolicyError, match=r"the teacher does not answer(.|\n)*continue with --resume"):
        updater.train_step(student_batch(teacher))
    assert student.steps == 1 and all(torch.equal(value, student.weights[name]) for name, value in before.items())


@pytest.mark.parametrize(
    "answer",
    [
        None, [], "text", {"meta_info": None}, {"meta_info": {"input_token_logprobs": 3}},
        {"meta_info": {"input_token_logprobs": [[-0.1, 1, None]]}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("top_k", [0, 2])
def test_answer_that_has_no_logprobs_of_these_ids_is_refused(top_k: int, answer: Any, teacher: Path) -> None:
    async def generate(_: Any) -> JSONResponse:
        return JSONResponse(answer)

    app = Starlette()
    app.add_route("/generate", generate, methods=["POST"])
    student = small_student(teacher)
    with serving(app) as url, pytest.raises(PolicyError, match="does not return the logprobs of the ids"):
        PolicyUpdater(student, distilling(top_k, url=url), exact=True).train_step(student_batch(teacher))


@pytest.mark.parametrize("likely", [None, [], [[[-0.1, 3, None]]], [[[-0.1, 3, None], [-0.2, "4", None]]]])
def test_answer_without_the_likely_tokens_of_each_place_is_refused(likely: Any, teacher: Path) -> None:
    class OtherServer(ModelServer):
        async def generate(self, body: Any) -> Any:
            answer = await super().generate(body)
            places = len(answer["meta_info"]["input_top_logprobs"])
            answer["meta_info"]["input_top_logprobs"] = likely and likely * places
            return answer

    student = small_student(teacher)
    with serving(OtherServer(teacher).app()) as url, pytest.raises(PolicyError, match="the 2 most likely tokens"):
        PolicyUpdater(student, distilling(2, url=url), exact=True).train_step(student_batch(teacher))


def test_teacher_that_never_answers_is_given_up_in_time(teacher: Path) -> None:
    server = ModelServer(teacher)
    server.hung = True
    student = small_student(teacher)
    with serving(server.app()) as url, pytest.raises(PolicyError, match=r"did not answer /generate within 0\.2 s"):
        PolicyUpdater(student, distilling(url=url, timeout_s=0.2), exact=True).train_step(student_batch(teacher))


def change_tokenizer(folder: Path, into: Path) -> Path:
    """The same model, two of whose tokens have changed places."""
    shutil.copytree(folder, into)
    file = into / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = [token for token in vocabulary if token.isalpha()][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(content))
    return into


def test_teacher_with_other_tokens_is_found_by_content(teacher: Path, tmp_path: Path) -> None:
    tokenizer = FencedTokenizer(load_tokenizer(teacher))
    changed = change_tokenizer(teacher, tmp_path / "changed")
    for folder, expected in ((teacher, ""), (changed, "has other tokens than the model: id ")):
        with serving(ModelServer(folder).app()) as url:
            local = find_token_mismatch(ReferenceSettings(model=str(folder)), tokenizer, teacher)
            served = find_token_mismatch(ReferenceSettings(url=url), tokenizer, teacher)
        assert expected in local and expected in served and bool(local) == bool(served) == bool(expected)


def test_teacher_without_room_for_every_id_of_the_model_is_refused(teacher: Path, tmp_path: Path) -> None:
    tokenizer = FencedTokenizer(load_tokenizer(teacher))
    narrow = make_teacher(tmp_path)
    problem = find_token_mismatch(ReferenceSettings(model=str(narrow)), tokenizer, teacher)
    assert f"the teacher {narrow} has 50 tokens" in problem
    with pytest.raises(PolicyError, match="there is no folder"):
        find_token_mismatch(ReferenceSettings(model=str(tmp_path / "none")), tokenizer, teacher)


def test_settings_of_a_teacher_default_to_what_teaches() -> None:
    kl = distilling(model="teacher").kl
    assert kl.coefficient == 1.0 and kl.estimator == "k1+"
    assert TrainSettings.model_validate({"n": 1, "algorithm": {"kl": {"reference": {"model": "teacher"}}}}).n == 1
    for wrong, message in (
        ({"kl": {"reference": {}}}, "name the teacher's folder"),
        ({"kl": {"reference": {"model": "a", "url": "http://b"}}}, "name the teacher's folder"),
        ({"kl": {"reference": {"model": "a"}, "estimator": "k1"}}, "has no gradient in the loss"),
        ({"kl": {"coefficient": 1, "top_k": 4, "in_reward": True}}, "`top_k` needs a gradient"),
        ({"kl": {"top_k": 4}}, "`top_k` does nothing without a `coefficient`"),
    ):
        with pytest.raises(ValidationError, match=message):
            AlgorithmSettings.model_validate(wrong)
    with pytest.raises(ValidationError, match="temperature 1 only"):
        TrainSettings.model_validate(
            {"sampling": {"temperature": 0.7}, "algorithm": {"kl": {"reference": {"url": "http://b"}}}}
        )


def test_run_distills_without_siblings(run: RunCommand) -> None:
    config = write_config(n=1, steps=2, algorithm={"kl": {"reference": {"model": str(demo_model())}}})
    shown = run("--config", config, "--out", "r").output
    assert "no group has a learning signal" not in shown
    for metrics in read_run_metrics("r"):
        assert metrics["groups/teaching"] == metrics["groups/count"] == 2 and metrics["update/tokens"] > 0
        assert "kl/reference" in metrics


def test_run_whose_teacher_has_other_tokens_ends_before_its_first_step(run: RunCommand) -> None:
    changed = change_tokenizer(demo_model(), Path("changed"))
    config = write_config(n=1, algorithm={"kl": {"reference": {"model": str(changed)}}})
    for words in ((), ("--dry-run",)):
        shown = run("--config", config, "--out", "r", *words, code=2 - bool(words)).output
        assert "algorithm.kl.reference: the teacher changed has other tokens than the model: id " in shown
    assert not Path("r/metrics.jsonl").exists()


def test_two_readers_of_one_model_agree() -> None:
    model = tiny_model()
    first, second = (LogprobReader(model, 1024) for _ in range(2))
    assert not first.fallback_reason and not second.fallback_reason
    assert first.compute_logprobs([1, 2, 3]) == second.compute_logprobs([1, 2, 3])
