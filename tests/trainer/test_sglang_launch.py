"""What stands in for CUDA is there before SGLang is, in each of its processes, and hides nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from rich.console import Console

from trainer import engines
from trainer.config import PlaySettings, ServingSettings
from trainer.engine.base import EngineError
from trainer.engine.sglang import launch
from trainer.engine.sglang.own import NOTHING
from trainer.policy.memory import Plan
from trainer.policy.placement import Placement
from trainer.train import start

SERVER = '''
import json, multiprocessing, os, sys

def seen():
    """What a process of SGLang's finds."""
    import sgl_kernel, torch
    from sgl_kernel import assign_req_to_token_pool_cpu

    try:
        assign_req_to_token_pool_cpu(1, of=2)
    except NotImplementedError as error:
        told = str(error)
    names = ("SGLANG_USE_CPU_ENGINE", "SGLANG_ROPE_CACHE_FP32", "OMP_NUM_THREADS")
    return told, str(torch.ops.torchvision.nms), [os.environ.get(name) for name in names]

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(1) as pool:
        from sglang.launch_server import seen
        print(json.dumps({"words": sys.argv, "first": seen(), "spawned": pool.apply(seen)}))
'''


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An SGLang that only looks around, for `launch.py` to start."""
    told = tmp_path / f"sglang-{launch.TESTED[0]}.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {launch.TESTED[0]}\n", encoding="utf-8")
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER, encoding="utf-8")
    return tmp_path


def test_every_process_of_sglang_finds_what_stands_in_and_the_callers_options_come_last(installed: Path) -> None:
    told = launched(installed, "--device", "cpu", "--dtype", "bfloat16")
    words = told["words"]
    assert words[-4:] == ["--device", "cpu", "--dtype", "bfloat16"]
    assert words.index("float32") < words.index("bfloat16")
    assert words[words.index("--attention-backend") + 1] == "torch_native"
    assert told["first"] == told["spawned"]
    refused, operator, environment = told["first"]
    assert "assign_req_to_token_pool_cpu" in refused
    assert operator == "torchvision.nms"
    assert environment == ["1", "1", "1"]


def test_what_the_caller_says_in_the_environment_stays(installed: Path) -> None:
    told = launched(installed, "--device=cpu", OMP_NUM_THREADS="7", SGLANG_ROPE_CACHE_FP32="0")
    assert told["spawned"][2] == ["1", "0", "7"]


def test_a_version_that_was_not_tested_is_not_started_without_cuda() -> None:
    with pytest.raises(SystemExit, match=r"SGLang 0.5.22 was not tested without CUDA; tested: 0.5.23"):
        launch.check("0.5.22")
    for version in launch.TESTED:
        launch.check(version)


def test_a_python_without_sglang_is_told_so() -> None:
    with pytest.raises(SystemExit, match="has no SGLang: `make sglang`"):
        launch.main(["--device", "cpu"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "cpu"], True),
        (["--model-path", "m", "--device=cpu"], True),
        (["--device", "cuda"], False),
        (["--device=cuda", "--port", "1"], False),
    ],
)
def test_the_device_is_the_one_that_is_asked_for(words: list[str], expected: bool) -> None:
    assert launch.on_cpu(words) is expected


@pytest.mark.parametrize("cuda", [True, False])
def test_where_no_device_is_asked_for_it_is_the_cpu_only_without_cuda(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert launch.on_cpu(["--model-path", "m"]) is not cuda


def test_with_cuda_sglang_is_started_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("runpy.run_module", lambda *names, **more: started.append((names, more, [*sys.argv])))
    monkeypatch.setattr(sys, "argv", [])
    modules = {*sys.modules}
    launch.main(["--device", "cuda", "--port", "1"])
    words = ["sglang.launch_server", "--device", "cuda", "--port", "1"]
    assert started == [(("sglang.launch_server",), {"run_name": "__main__"}, words)]
    assert "sgl_kernel" not in {*sys.modules} - modules


def test_no_kernel_can_be_called() -> None:
    module = launch.kernels()
    for name in launch.KERNELS:
        with pytest.raises(NotImplementedError, match=name):
            getattr(module, name)()
    assert not hasattr(module, "rmsnorm")


def served(model: Path, *options: str, replicas: int = 2) -> list[tuple[str, ...]]:
    """What is said of GPUs to each server that would be started."""
    settings = PlaySettings(engine="sglang", serving=ServingSettings(replicas=replicas, options=options))
    engine: Any = engines._sglang("sglang", settings, model, Path("logs"), NOTHING, print)
    return [server.options.more[len(options) :] for server in engine._servers]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ((), ["0", "1"]),
        (("--tp", "2"), ["0", "2"]),
        (("--tp-size=2", "--pp-size", "2"), ["0", "4"]),
        (("--base-gpu-id", "4", "--tensor-parallel-size", "2"), ["4", "6"]),
    ],
)
def test_each_server_has_gpus_of_its_own(
    options: tuple[str, ...], first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert served(tmp_path, *options) == [("--base-gpu-id", gpu) for gpu in first]
    assert served(tmp_path, *options, replicas=1) == [()]
    assert served(tmp_path, "--device", "cpu", *options) == [(), ()]


def test_more_servers_than_there_are_gpus_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(tmp_path) == [(), ()]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(EngineError, match=r"`serving.replicas` asks for 2 servers with 2 GPUs each.* there are 3"):
        served(tmp_path, "--tp", "2")


async def test_the_plan_of_the_memory_is_told_though_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan((), 2**30)
    monkeypatch.setattr(start, "placement", lambda *_: Placement("beside", plan, 0.5))
    monkeypatch.setattr(start, "_policy", lambda *_: None)

    def engine(*_: object) -> NoReturn:
        raise EngineError("no memory")

    job: Any = SimpleNamespace(settings=SimpleNamespace(serving=ServingSettings()), model=None, engine=engine)
    folder: Any = SimpleNamespace(path=Path("run"))
    console = Console(file=io.StringIO(), width=200)
    async with AsyncExitStack() as stack:
        with pytest.raises(EngineError, match="no memory"):
            await start._training(job, folder, None, stack, console)
    assert "the server may take 50%" in console.file.getvalue()  # type: ignore[attr-defined]


def launched(packages: Path, *words: str, **variables: str) -> dict[str, Any]:
    """As a server starts it, in another Python than ours but for its torch."""
    names = {*launch.ENVIRONMENT, "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-P", launch.__file__, *words],
        env=environment | {"PYTHONPATH": str(packages)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
