"""The launcher of SGLang on machines without CUDA, and the options of its servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer import engines
from trainer.engine.sglang import launch
from trainer.engine.sglang.weight_sync.verify import NO_REFERENCE
from trainer.rollout.settings import BaseRolloutSettings, ServingSettings

SERVER = '''
import json, multiprocessing, os, sys

def seen():
    """What a process of SGLang's finds."""
    import sgl_kernel, torch
    from sgl_kernel import assign_req_to_token_pool_cpu

    try:
        assign_req_to_token_pool_cpu(1, of=2)
    except NotImplementedError as error:
        seen = str(error)
    names = ("SGLANG_USE_CPU_ENGINE", "SGLANG_ROPE_CACHE_FP32", "OMP_NUM_THREADS")
    return seen, str(torch.ops.torchvision.nms), [os.environ.get(name) for name in names]

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(1) as pool:
        from sglang.launch_server import seen
        print(json.dumps({"words": sys.argv, "first": seen(), "spawned": pool.apply(seen)}))
'''


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An SGLang that only looks around, for `launch.py` to start."""
    seen = tmp_path / f"sglang-{launch.TESTED[0]}.dist-info" / "METADATA"
    seen.parent.mkdir()
    seen.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {launch.TESTED[0]}\n", encoding="utf-8")
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER, encoding="utf-8")
    return tmp_path


def test_sglang_processes_find_the_kernel_stand_in_and_user_options_come_last(installed: Path) -> None:
    seen = launched(installed, "--device", "cpu", "--dtype", "bfloat16")
    words = seen["words"]
    assert words[-4:] == ["--device", "cpu", "--dtype", "bfloat16"]
    assert words.index("float32") < words.index("bfloat16")
    assert words[words.index("--attention-backend") + 1] == "torch_native"
    assert seen["first"] == seen["spawned"]
    refused, operator, environment = seen["first"]
    assert "assign_req_to_token_pool_cpu" in refused
    assert operator == "torchvision.nms"
    assert environment == ["1", "1", "1"]


def test_untested_release_is_refused_without_cuda() -> None:
    with pytest.raises(SystemExit, match=r"SGLang 0.5.22 was not tested without CUDA; tested: 0.5.23"):
        launch.check("0.5.22")
    for version in launch.TESTED:
        launch.check(version)


def test_requested_device_is_used() -> None:
    for words, expected in ("--device cpu", True), ("--model-path m --device=cpu", True), ("--device=cuda -p 1", False):
        assert launch.on_cpu(words.split()) is expected


@pytest.mark.parametrize(
    ("words", "cores", "bound"),
    [
        (["--tp", "2"], {0, 1, 2, 3}, "0,1|2,3"),
        (["--tensor-parallel-size=2", "--pp", "2"], {4, 6}, "4|6|4|6"),
        (["--tp", "1"], {0, 1}, None),
        (["--model-path", "m"], {0, 1}, None),
    ],
)
def test_processes_of_a_server_on_the_cpu_share_its_cores(
    words: list[str], cores: set[int], bound: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert launch.bind_cores(words).get("SGLANG_CPU_OMP_THREADS_BIND") == bound


def served(model: Path, *options: str, replicas: int = 2, trainer_gpus: int = 0) -> list[tuple[str, ...]]:
    """The GPU flags of each server that would be started."""
    serving = engines.leave_gpus(ServingSettings(replicas=replicas, options=options), trainer_gpus)
    settings = BaseRolloutSettings(engine="sglang", serving=serving)
    engine: Any = engines._make_sglang_engine("sglang", settings, model, Path("logs"), NO_REFERENCE, print)
    return [server.options.extra[len(serving.options) :] for server in engine._servers]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ((), ["0", "1"]),
        (("--tp", "2"), ["0", "2"]),
        (("--tp-size=2", "--pp-size", "2"), ["0", "4"]),
        (("--base-gpu-id", "4", "--tensor-parallel-size", "2"), ["4", "6"]),
    ],
)
def test_each_server_gets_its_own_gpus(
    options: tuple[str, ...], first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert served(tmp_path, *options) == [("--base-gpu-id", gpu) for gpu in first]
    assert served(tmp_path, *options, replicas=1) == [()]
    assert served(tmp_path, "--device", "cpu", *options) == [(), ()]


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
