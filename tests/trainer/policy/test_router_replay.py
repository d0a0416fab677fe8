"""Router replay: what a server tells of its experts reaches the pass that trains, and the mismatch shrinks."""

from __future__ import annotations

import base64
import json
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtrl_plugins.agents.turn_tree import PolicyTurn, _make_ledger
from tests.trainer.distributed.expert_models import EXPERTS, KINDS, save_expert_model
from tests.trainer.distributed.rank_pools import make_updater, random_batch
from tests.trainer.engine_sglang.engine_harness import hosting
from tests.trainer.engine_sglang.model_server import ModelServer
from tests.trainer.policy.tiny_policies import model_gradient, tiny_model
from tests.trainer.train.jobs import demo_model
from tests.trainer.train.test_modes import make_job, read_lines, string_console
from tests.trainer.train.trainings import NATIVE
from trainer.algorithms.packing import BatchRow, pack
from trainer.algorithms.settings import AlgorithmSettings
from trainer.ledger import Author, Entry, Experts, Ledger
from trainer.policy.logprobs import PackedTokens, PassPlan
from trainer.policy.policy import Policy
from trainer.policy.router_replay import RouterReplay
from trainer.policy.settings import Checkpointing, PolicyError, UpdateSettings
from trainer.train.start import train

LAYERS, CHOSEN = 2, 2


@contextmanager
def noting_choices(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The experts of each layer, in the order in which layers run."""
    choices: list[Tensor] = []

    def note(_: nn.Module, __: object, output: tuple[Tensor, ...]) -> None:
        choices.append(output[2])

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def experts_of(model: PreTrainedModel, ids: Sequence[int]) -> list[int]:
    with noting_choices(model) as choices:
        model(torch.tensor([list(ids)]))
    return torch.stack(choices, 1).flatten().tolist()


class ExpertServer(ModelServer):
    """Computes in half the trainer's precision, as servers do, and tells the experts if it is started so."""

    def __init__(self, folder: Path, *, tells: bool) -> None:
        super().__init__(folder)
        self.model = self.model.to(torch.bfloat16)
        self.info |= {"enable_return_routed_experts": tells, "dtype": "bfloat16"}
        self.stored = load_file(folder / "model.safetensors")

    async def generate(self, body: Any) -> Any:
        answer = await super().generate(body)
        if body.get("return_routed_experts"):
            assert self.info["enable_return_routed_experts"]
            ids = [*body["input_ids"], *answer["output_ids"]][:-1]
            told = experts_of(self.model, ids)[body["routed_experts_start_len"] * LAYERS * CHOSEN :]
            answer["meta_info"]["routed_experts"] = base64.b64encode(array("i", told).tobytes()).decode()
        return answer

    def _took(self, named: dict[str, torch.Tensor], body: Any) -> Any:
        """The model's files have each expert by itself, the model has them in one tensor."""
        self.stored |= {name: value.contiguous() for name, value in named.items()}
        save_file(self.stored, self.folder / "model.safetensors", {"format": "pt"})
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16).eval()
        self.version = body.get("weight_version", self.version)
        return {"success": True, "message": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's tokenizer, and a model with experts."""
    folder = tmp_path / "experts"
    shutil.copytree(demo_model(), folder)
    names = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")
    config = json.loads((folder / "config.json").read_text())
    save_expert_model(folder, "qwen3_moe", **{name: config[name] for name in names if name in config})
    return folder


async def test_a_job_whose_server_tells_its_experts_has_less_mismatch(
    folder: Path, tmp_path: Path, one_thread: None
) -> None:
    for file, text in NATIVE.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    mismatch = {}
    for tells in (False, True):
        served = shutil.copytree(folder, tmp_path / f"served-{tells}")
        async with hosting(ExpertServer(served, tells=tells).app()) as url:
            changes = {"model": str(folder), "engine": url, "steps": 1, "prompts": 2}
            changes["evaluation"] = {"every": 0, "rows": 1, "final_rows": 1}
            run = tmp_path / f"run-{tells}"
            await train(make_job(str(tmp_path / "tools"), "synchronous", **changes), run, string_console())
        line = read_lines(run)[0]
        mismatch[tells] = line["mismatch/kl"]
        assert (line.get("mismatch/replayed", 0) > 0.9) == tells
    assert mismatch[True] < mismatch[False] / 2, mismatch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, "feed_forward", True])
def test_told_experts_are_taken_and_the_own_ones_change_nothing(
    kind: str, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    model = save_expert_model(tmp_path, kind)
    policy = Policy.load(tmp_path, UpdateSettings(gradient_checkpointing=checkpointing), "cpu")
    rows = [[5, 6, 7, 8], [5, 6, 9]]
    own = [experts_of(model, ids) for ids in rows]
    other = [[(expert + 1) % 4 for expert in experts] for experts in own]
    gradients = {}
    for name, experts in {"none": [(), ()], "own": own, "other": other, "half": [own[0][:8] + [-1] * 8, ()]}.items():
        batch = pack([make_row(ids, told) for ids, told in zip(rows, experts, strict=True)])
        inputs = batch.ids_T, batch.sequence_T, batch.mask_T
        with noting_choices(policy.model) as choices:
            plan = policy.logprob_reader.plan(*inputs, batch.experts_TX)
            result = policy.logprob_reader.compute_batch_logprobs(PackedTokens(*inputs), plan)
        if name == "other":  # The nodes: the first row, and the last token of the second.
            chosen = torch.stack(choices[:LAYERS], 1).flatten().tolist()
            assert chosen == [*other[0], *other[1][2 * LAYERS * CHOSEN :]]
        policy.zero_grad()
        result.logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
        gradients[name] = model_gradient(policy.model)
    assert torch.allclose(gradients["own"], gradients["none"], atol=1e-5)
    assert torch.allclose(gradients["half"], gradients["none"], atol=1e-5)
    assert not torch.allclose(gradients["other"], gradients["none"], atol=1e-3)
    router = next(value for name, value in policy.model.named_parameters() if "gate.weight" in name)
    assert router.grad is not None and router.grad.abs().sum() > 0


def make_row(ids: list[int], experts: Sequence[int]) -> BatchRow:
    mask, zeros = [False, *[True] * (len(ids) - 1)], [0.0] * len(ids)
    return BatchRow("row", ids, mask, zeros, zeros, [float(own) for own in mask], experts=array("h", experts))


def test_models_without_known_routers_and_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no router"):
        RouterReplay(tiny_model())
    save_expert_model(tmp_path, "qwen3_moe")
    policy = Policy.load(tmp_path, UpdateSettings(), "cpu")
    for experts, problem in (
        ([0, 1, 2] * LAYERS * 3, "6 experts, and the trainer to 4"),
        ([0] * 3 * LAYERS * CHOSEN, "an expert twice"),
    ):
        batch = pack([make_row([5, 6, 7], experts)])
        inputs = batch.ids_T, batch.sequence_T, batch.mask_T
        plan = policy.logprob_reader.plan(*inputs, batch.experts_TX)
        with pytest.raises(PolicyError, match=problem):
            policy.logprob_reader.compute_batch_logprobs(PackedTokens(*inputs), plan)


def test_expert_that_the_model_lacks_is_refused_before_the_pass(tmp_path: Path) -> None:
    save_expert_model(tmp_path, "mixtral")
    batch = random_batch(tiny_model(), 1)
    sequences = [replace(each, experts=array("h", [0, EXPERTS, 1, 2] * len(each.ids))) for each in batch.sequences]
    _, updater = make_updater(None, tmp_path, AlgorithmSettings(), UpdateSettings())
    with pytest.raises(PolicyError, match="tells expert 4, and the trainer's model has 4, from 0 on"):
        updater.train_step(replace(batch, sequences=tuple(sequences)))


def make_turn(ids: tuple[int, ...], experts: Experts | None) -> Entry:
    return Entry(Author.POLICY, ids, logprobs=(0.0,) * len(ids), experts=experts)


def test_each_turn_adds_the_experts_of_what_came_since_the_turn_before() -> None:
    ledger = Ledger() + Entry(Author.TASK, (1, 2, 3))
    assert ledger.routed_tokens == 0 and not ledger.experts
    ledger += make_turn((4, 5), array("h", (10, 20, 30, 40)))
    assert ledger.routed_tokens == 4
    ledger = ledger + Entry(Author.TOOL, (6,)) + make_turn((7,), None)
    assert ledger.experts.tolist() == [10, 20, 30, 40, -1, -1, -1]
    ledger += make_turn((8,), array("h", (50, 60, 70)))
    assert ledger.routed_tokens == 7 and ledger.experts.tolist() == [10, 20, 30, 40, 50, 60, 70, -1]
    lost = Ledger(tuple(replace(entry, experts=None) if entry.ids == (4, 5) else entry for entry in ledger))
    assert not lost.experts


def test_a_second_branch_of_an_agent_has_the_experts_of_the_turn_that_both_follow() -> None:
    first = play(None, Entry(Author.TASK, (1, 2)), make_turn((3,), array("h", (10, 20))))
    others = [play(first, Entry(Author.TOOL, (id,)), make_turn((6,), array("h", (30, id)))) for id in (4, 5)]
    seen: set[int] = set()
    assert [_make_ledger(turn, seen).experts.tolist() for turn in others] == [[10, 20, 30, 4, -1], [10, 20, 30, 5, -1]]


def play(parent: PolicyTurn | None, prompt: Entry, turn: Entry) -> PolicyTurn:
    return PolicyTurn(parent, prompt, turn, {}, tools=b"", ended=True)


def test_siblings_share_the_experts_of_the_first_that_has_any() -> None:
    rows = [
        make_row([5, 6, 7], ()),
        make_row([5, 6, 8], [1, 2, 3, 4, 5, 6]),
        make_row([5, 6, 9], [7, 8, 9, 10, 11, 12]),
    ]
    batch = pack(rows)
    plan = PassPlan.make(batch.ids_T, batch.sequence_T, batch.mask_T, False, batch.experts_TX)
    assert plan.experts_UX is not None
    told = dict(zip(plan.forest.ids_U.tolist(), plan.experts_UX.tolist(), strict=True))
    assert told == {5: [1, 2], 6: [3, 4], 7: [-1, -1], 8: [5, 6], 9: [11, 12]}
