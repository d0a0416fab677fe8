"""Engines, gateway, stepper, parsers and plug-ins are opened from settings, or refused; how an engine holds weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import trainer.engines
from gateway.config.models import ResultLimit
from gateway.errors import ConfigError
from gateway.types import ToolCall
from tests.trainer import tiny_models
from trainer.engine.base import EngineError, Generation, Sampling
from trainer.engine.sglang import server_process
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.disk import DiskSync
from trainer.engine.sglang.weight_sync.process_group import ProcessGroupSync
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.torch import choose_holding
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.engine.torch.weights import Holding
from trainer.engines import make_engine
from trainer.parse.base import CallParser
from trainer.parse.choose import PARSERS, choose_parser, load_parser
from trainer.parse.plain import PlainText
from trainer.policy.policy import Policy
from trainer.policy.settings import LoraSettings, UpdateSettings
from trainer.rollout.settings import BaseRolloutSettings, RolloutSettings, ServingSettings, TemplateSettings
from trainer.rollout.steppers import ToolsAndFeedback
from trainer.setup import load_template, make_gateway, make_stepper


def made(model: Path, engine: str, **serving: Any) -> Any:
    settings = BaseRolloutSettings(engine=engine, serving=ServingSettings(**serving))
    return make_engine(settings, model, load_template(model, TemplateSettings()), Path("logs"))


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_servers_are_told_how_exact_they_shall_be(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_on_gpu: bool
) -> None:
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    seen: list[tuple[str, ...]] = []
    process = server_process.ServerProcess

    def record(model: Path, options: server_process.ServerOptions, **more: Any) -> server_process.ServerProcess:
        seen.append(options.extra)
        return process(model, options, **more)

    monkeypatch.setattr(server_process, "ServerProcess", record)
    serving = ServingSettings(fp32_head=True, options=("--device", "cuda" if is_on_gpu else "cpu"))
    settings = BaseRolloutSettings(engine="sglang", deterministic=True, serving=serving)
    make_engine(settings, model, load_template(model, TemplateSettings()), Path("logs"))
    assert "--enable-fp32-lm-head" in seen[0]
    assert ("--enable-deterministic-inference" in seen[0]) == is_on_gpu, "SGLang has that mode on GPUs alone"


def test_auto_selects_sglang_with_cuda_if_installed(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", str(tmp_path / "none"))
    assert not trainer.engines.can_use_sglang()
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", str(tmp_path / "python"))
    assert trainer.engines.can_use_sglang()
    assert isinstance(made(model, "auto"), SGLangEngine)


@pytest.mark.parametrize(
    ("engine", "cuda", "publish", "way"),
    [
        ("sglang", False, "auto", TensorSync),
        ("sglang", True, "auto", TensorSync),
        ("http://localhost:30000", True, "auto", TensorSync),
        ("http://10.0.0.7:30000,http://10.0.0.8:30000", False, "auto", TensorSync),
        ("http://10.0.0.7:30000,http://10.0.0.8:30000", True, "auto", ProcessGroupSync),
        ("http://10.0.0.7:30000", True, "disk", DiskSync),
        ("http://localhost:30000", False, "group", ProcessGroupSync),
    ],
)
def test_weight_transfer_depends_on_where_servers_run(
    engine: str, cuda: bool, publish: str, way: type, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert isinstance(made(model, engine, weight_sync=publish)._publisher._weight_sync, way)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("3", "--tp 3, which does not divide M: it has 4 attention heads; it has 2 key-value heads"),
        ("8", "it has 4 attention heads"),
    ],
)
def test_server_whose_tensor_parallelism_does_not_divide_the_model_is_refused_before_it_starts(
    model: Path, tmp_path: Path, size: str, problem: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "M")
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 96, "intermediate_size": 192}
    for config in (text, {"text_config": text}):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(EngineError, match=problem) as raised:
            made(folder, "sglang", options=("--tp-size", size))
        assert f"use --tp {2 if size == '3' else 4}," in str(raised.value)
        made(folder, "sglang", options=("--tp=4",))


SAMPLING = Sampling(max_tokens=24, seed=3)
PROMPT = list(range(2, 40))
FAMILIES = ["qwen2", "qwen3", "llama", "biased"]


class ModeSettings(BaseRolloutSettings):
    mode: str = "synchronous"


@pytest.fixture
def every_size_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_holding, "MIN_SHARED", 0)


def make_for(model: Path, mode: str, **update: Any) -> tuple[Any, Policy]:
    policy = Policy.load(model, UpdateSettings(**update))
    template = load_template(model, TemplateSettings())
    settings = ModeSettings(mode=mode, engine="torch")
    return make_engine(settings, model, template, Path("logs"), policy=policy), policy


def shared_pointers(engine: Any, policy: Policy) -> set[str]:
    """The trainer's matrices whose memory the engine uses."""
    weights = engine._model._weights
    held = {matrix.data_ptr() for name in weights._fused for matrix in weights.matrices(name)}
    return {name for name, value in policy.model.named_parameters() if value.ndim == 2 and value.data_ptr() in held}


def test_synchronous_run_has_one_copy_of_the_weights(model: Path, every_size_shares: None, one_thread: None) -> None:
    engine, policy = make_for(model, "synchronous")
    matrices = {name for name, value in policy.model.named_parameters() if value.ndim == 2}
    assert shared_pointers(engine, policy) == matrices and matrices


@pytest.mark.parametrize(
    ("mode", "update"), [("one_step_off", {}), ("asynchronous", {}), ("synchronous", {"lora": LoraSettings(rank=1)})]
)
def test_engine_keeps_its_copy_where_weights_differ_or_change_during_rollouts(
    model: Path, mode: str, update: dict[str, Any], every_size_shares: None, one_thread: None
) -> None:
    engine, policy = make_for(model, mode, **update)
    assert not shared_pointers(engine, policy)


async def generate(model: Any, holding: Holding) -> Generation:
    async with TorchEngine(model, holding=holding) as engine:
        return await engine.generate(PROMPT, SAMPLING)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_weights_generate_what_copied_ones_do(family: str, one_thread: None) -> None:
    model = tiny_models.load_model(family)
    copied, shared = anyio.run(generate, model, "copied"), anyio.run(generate, model, "shared")
    assert copied.ids == shared.ids
    assert shared.logprobs == pytest.approx(copied.logprobs, abs=1e-5)


def test_engine_that_shares_weights_makes_no_step_from_release_until_publish(one_thread: None) -> None:
    after: list[Generation] = []

    async def play() -> None:
        model = tiny_models.build_qwen2()
        async with TorchEngine(model, holding="shared") as engine, anyio.create_task_group() as tasks:
            first = await engine.generate(PROMPT, SAMPLING)
            assert await engine.release_memory() and engine._batch._kv_cache.length == 0

            async def continue_later() -> None:
                after.append(await engine.generate(PROMPT, SAMPLING))

            tasks.start_soon(continue_later)
            await anyio.wait_all_tasks_blocked()
            assert not after
            with torch.no_grad():
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
            await engine.publish(dict(model.state_dict()), 1)
            with anyio.fail_after(60):
                while not after:
                    await anyio.lowlevel.checkpoint()
            assert after[0].version == 1 and after[0].ids != first.ids

    anyio.run(play)
    model = tiny_models.build_qwen2()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert anyio.run(generate, model, "copied").ids == after[0].ids


PLUGINS = """
from trainer.rollout.steppers import ThinkAgain, ToolsAndFeedback

class Mine(ToolsAndFeedback):
    pass

class Needy(ToolsAndFeedback):
    def __init__(self, what):
        pass

again = ThinkAgain(lambda text, task: True)
half = type("Half", (), {"step": lambda self, turn: None})
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    file = tmp_path / "my_plugins.py"
    file.write_text(PLUGINS)
    return file


def settings(stepper: str | None) -> RolloutSettings:
    return RolloutSettings(model=Path("m"), data="d", out=Path("o"), stepper=stepper)


def test_plugin_is_loaded_from_a_module_or_a_file(plugins: Path) -> None:
    assert type(make_stepper(settings("trainer.rollout.steppers:ToolsAndFeedback"))) is ToolsAndFeedback
    assert type(make_stepper(settings(f"{plugins}:Mine"))).__name__ == "Mine"
    assert make_stepper(settings(f"{plugins}:again")) is make_stepper(settings(f"{plugins}:again"))


@pytest.mark.parametrize(
    ("name", "words"), [("Needy", "cannot be instantiated.*existing object"), ("half", "lacks check_finished")]
)
def test_invalid_plugin_is_reported_with_a_remedy(plugins: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        make_stepper(settings(f"{plugins}:{name}"))


async def test_result_limit_of_the_run_applies_to_tools_without_one(tmp_path: Path) -> None:
    (tmp_path / "lengthy.py").write_text(
        "def long() -> str:\n    return 'a' * 50\ndef own() -> str:\n    return 'b' * 50\n"
    )
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("tools: [{function: lengthy:long}]")
    two.write_text("tools: [{function: lengthy:own, result_limit: 40}]")
    settings = BaseRolloutSettings(tools=(str(one), str(two)), result_limit=ResultLimit(chars=20, side="right"))
    with anyio.fail_after(60):
        async with make_gateway(settings) as gateway, gateway.open() as session:
            long, own = [await session.call(ToolCall("1", name, "{}")) for name in ("long", "own")]
    assert long.text.startswith("a" * 5) and not long.text.endswith("a") and len(long.text) < 50
    assert len(own.text) > len(long.text)


@pytest.mark.parametrize("template", ["[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "<tool_call>{{ call | tojson }}"])
def test_formats_of_one_family_are_distinguished(template: str) -> None:
    assert choose_parser(template).name == ("mistral_args" if "ARGS" in template else "hermes")


def test_each_name_and_alias_makes_a_parser_with_its_schemas() -> None:
    schemas = {"add": {"properties": {"a": {"type": "integer"}}}}
    for name in PARSERS:
        parser = load_parser(name, schemas, thinking_open=True)
        assert isinstance(parser, CallParser | PlainText)
        assert (parser.schemas, parser.thinking_open) == (schemas, True)
    assert load_parser("gpt-oss").name == "harmony"


def test_user_parser_is_loaded_from_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parser_for_test.py").write_text(
        "from trainer.parse.hermes import Hermes\n"
        "class Own(Hermes):\n    name = 'own'\n"
        "class Bare:\n    pass\n"
        "class Dumb:\n    def __init__(self, schemas, *, thinking_open): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parser = load_parser("own_parser_for_test:Own")
    assert parser.name == "own"
    assert parser.parse('<tool_call>{"name": "a"}</tool_call>').calls == (ToolCall("", "a", "{}"),)
    with pytest.raises(ConfigError, match="cannot be created"):
        load_parser("own_parser_for_test:Bare")
    with pytest.raises(ConfigError, match="is not a parser"):
        load_parser("own_parser_for_test:Dumb")
    with pytest.raises(ConfigError, match="no module"):
        load_parser("no_such_module_for_test:Own")
