"""Which engine writes: what is asked for is what there is, or an error says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import trainer.engines
from tests.trainer.models import tiny_model
from trainer.config import PlaySettings, ServingSettings, TemplateSettings
from trainer.engine.base import EngineError
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.publish.disk import ByDisk
from trainer.engine.sglang.publish.group import ByGroup
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.server import Server
from trainer.engine.torch import TorchEngine
from trainer.engines import engine_of
from trainer.stage import template_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def made(model: Path, engine: str, **serving: Any) -> Any:
    settings = PlaySettings(engine=engine, serving=ServingSettings(**serving))
    return engine_of(settings, model, template_of(model, TemplateSettings()), Path("logs"))


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_without_cuda_the_embedded_engine_is_taken(engine: str, model: Path, one_thread: None) -> None:
    assert isinstance(made(model, engine), TorchEngine)


def test_auto_takes_sglang_where_it_is_installed_and_cuda_is_there(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", str(tmp_path / "none"))
    assert not trainer.engines.for_sglang()
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", str(tmp_path / "python"))
    assert trainer.engines.for_sglang()
    assert isinstance(made(model, "auto"), SGLangEngine)


def test_servers_are_started_as_many_as_are_asked_for_each_with_a_log(model: Path) -> None:
    engine = made(model, "sglang", replicas=2, options=("--mem-fraction-static", "0.4"))
    first, second = engine._servers
    assert isinstance(first, Server) and first.model == model
    assert [server.log for server in (first, second)] == [Path("logs/sglang-0.log"), Path("logs/sglang-1.log")]
    assert first.options.words() == ["--skip-tokenizer-init", "--mem-fraction-static", "0.4"]


def test_deterministic_servers_are_asked_for_by_a_setting_where_there_are_any(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"`serving.deterministic` needs a GPU"):
        made(model, "sglang", deterministic=True)
    with pytest.raises(EngineError, match="start it with --enable-deterministic-inference"):
        made(model, "http://localhost:30000", deterministic=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (server,) = made(model, "sglang", deterministic=True)._servers
    assert "--enable-deterministic-inference" in server.options.words()


def test_a_model_that_sees_is_served_with_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert trainer.engines._sees(tmp_path)
    assert not trainer.engines._sees(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("engine", "cuda", "publish", "way"),
    [
        ("sglang", False, "auto", ByTensors),
        ("sglang", True, "auto", ByTensors),
        ("http://localhost:30000", True, "auto", ByTensors),
        ("http://10.0.0.7:30000,http://10.0.0.8:30000", False, "auto", ByTensors),
        ("http://10.0.0.7:30000,http://10.0.0.8:30000", True, "auto", ByGroup),
        ("http://10.0.0.7:30000", True, "disk", ByDisk),
        ("http://localhost:30000", False, "group", ByGroup),
    ],
)
def test_weights_go_the_way_that_suits_where_the_servers_are(
    engine: str, cuda: bool, publish: str, way: type, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert isinstance(made(model, engine, publish=publish)._way, way)


@pytest.mark.parametrize("engine", ["vllm", "localhost:30000", "http://a:1,", "http://a:1, http://b:1", ""])
def test_an_engine_that_is_none_is_refused_with_those_that_are(engine: str) -> None:
    with pytest.raises(ValidationError, match="auto, torch, sglang, or addresses"):
        PlaySettings(engine=engine)


async def test_where_nothing_runs_no_other_engine_takes_its_place(model: Path) -> None:
    engine = made(model, "http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 cannot be reached"):
        async with engine:
            pass
