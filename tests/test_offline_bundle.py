"""A bundle for a machine without a network is packed, carried in parts, installed, and trains there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distribution, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OFFLINE = ROOT / ".ci" / "offline"
PYTHON = ".".join(map(str, sys.version_info[:2]))
TORCH = ".".join(version("torch").split("+")[0].split(".")[:2])
OF_THE_MACHINE = ("torch", "datasets", "peft", "transformers", "tensorboard")
"""What GPU machines hold; the rest of what mtrl needs is carried."""
WITHOUT_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
MISSING_PARTS = 3
DEFAULT_JOB = "--config default demo.warm=plain steps=1 evaluation.every=0 evaluation.after=false"
"""As it is, but for its length: the shorter of its model's two warm starts, one step, nothing measured."""
FAKE_TORCH = """
import types
__version__, version, cuda = {!r}, types.SimpleNamespace(cuda=None), types.SimpleNamespace(is_available=bool)
"""


def closure(names: tuple[str, ...]) -> set[str]:
    """These packages and all that they need, as installed here."""
    found: set[str] = set()
    open_names = list(names)
    while open_names:
        name = re.sub(r"[-_.]+", "-", open_names.pop()).lower()
        try:
            needs = distribution(name).requires or ()
        except ModuleNotFoundError:
            continue
        if name not in found:
            found.add(name)
            open_names += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Python with torch and what comes with it but nothing of mtrl; and the list of what it holds."""
    folder = tmp_path_factory.mktemp("machine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "python")], check=True)
    (site,) = (folder / "python").glob("lib/python3.*/site-packages")
    names = closure(OF_THE_MACHINE)
    for name in names:
        tops = {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            found = Path(str(distribution(name).locate_file(top)))
            if not (site / top).exists():
                (site / top).symlink_to(found)
    held = folder / "held.txt"
    held.write_text("".join(f"{name}=={version(name)}\n" for name in sorted(names)))
    return folder / "python" / "bin" / "python", held


@pytest.fixture(scope="module")
def bundle(machine: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle for that machine, in parts of 3 MB."""
    folder = tmp_path_factory.mktemp("bundle")
    command = [sys.executable, str(OFFLINE / "bundle.py"), "--dir", str(folder), "--size", "3M", "--xz-level", "0"]
    command += ["--python", PYTHON, "--torch", TORCH, "--held", str(machine[1]), "--without-sglang"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def install(bundle: Path, target: Path, python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the installer where no network is."""
    command = [*WITHOUT_NETWORK, "bash", str(bundle / "install.sh"), str(target), str(python)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_a_bundle_that_came_in_two_transfers_runs_the_default_job_without_a_network(
    bundle: Path, machine: tuple[Path, Path], tmp_path: Path
) -> None:
    packages = json.loads((bundle / "manifest.json").read_text())["contents"]["mtrl"]["packages"]
    carried = {pin.partition("==")[0] for pin in packages}
    assert {"mcp", "jsonschema-rs"} <= carried and not carried & {"torch", "triton", "transformers", "numpy"}
    first, target = tmp_path / "first", tmp_path / "target"
    shutil.copytree(bundle, first)
    manifest = json.loads((first / "manifest.json").read_text())
    manifest["contents"]["mtrl"]["options"] = ["--attention-backend", "triton"]  # As SGLang's has.
    (first / "manifest.json").write_text(json.dumps(manifest))
    later = sorted(first.glob("*.tar.xz.*"))[MISSING_PARTS:]
    for part in later:
        part.unlink()
    told = install(first, target, machine[0])
    assert told.returncode == 3 and later[0].name in told.stdout, told.stdout + told.stderr
    for part in first.glob("*.tar.xz.*"):
        part.unlink()
    for part in later:
        shutil.copy(bundle / part.name, first)
    told = install(first, target, machine[0])
    assert told.returncode == 0, told.stdout + told.stderr
    assert re.search(r"mtrl: [2-9]\d\d modules imported", told.stdout), told.stdout
    assert (target / "mtrl" / "launch_options.txt").read_text() == "--attention-backend triton"

    work = tmp_path / "work"
    shutil.copytree(ROOT / "tool_configs", work / "tool_configs")
    shutil.copy(ROOT / "mcp_servers.json", work)
    inside = f"ip link set lo up && . {target}/env.sh && exec mtrl-train --tools tool_configs/ {DEFAULT_JOB}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["XDG_CACHE_HOME"] = str(tmp_path)  # Its model is made there.
    job = subprocess.run(
        [*WITHOUT_NETWORK, "sh", "-c", inside], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    (metrics,) = work.glob("runs/*/metrics.jsonl")
    (step,) = map(json.loads, metrics.read_text().splitlines())
    assert step["step"] == 1 and step["reward/mean"] > 0.2, "it has learned to call tools, and calls them"


def test_a_damaged_part_another_python_and_another_torch_are_refused_by_name(
    bundle: Path, machine: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    part = sorted(broken.glob("*.tar.xz.*"))[1]
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(version("torch")))
    told = install(broken, tmp_path / "target", machine[0], PYTHONPATH=str(tmp_path))
    assert told.returncode == 1 and f"{part.name} is damaged" in told.stderr, told.stderr
    manifest = json.loads((bundle / "manifest.json").read_text())
    for key, other, words in (("python", "3.9", f"this is Python {PYTHON}"), ("torch", "1.13", "torch is")):
        (broken / "manifest.json").write_text(json.dumps(manifest | {key: other}))
        told = install(broken, tmp_path / "target", machine[0], PYTHONPATH=str(tmp_path))
        assert told.returncode == 1 and words in told.stderr and other in told.stderr, told.stderr
    assert not (tmp_path / "target" / "mtrl").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--size", "many"], "'many' is no size; write 64M"),
        (["--model", "nowhere"], "nowhere holds no config.json"),
        (["--torch", "99.0", "--without-sglang"], "torch"),
    ],
)
def test_a_mistake_is_named_before_anything_is_packed(words: list[str], problem: str, tmp_path: Path) -> None:
    command = [sys.executable, str(OFFLINE / "bundle.py"), "--dir", str(tmp_path / "bundle"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and problem in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "bundle").glob("*.xz*"))


@pytest.fixture
def packer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of `bundle.py`."""
    spec = spec_from_file_location("bundle", OFFLINE / "bundle.py")
    assert spec is not None and spec.loader is not None
    monkeypatch.setitem(sys.modules, "bundle", module := module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def test_make_passes_on_what_is_packed_and_what_is_left_out(packer: Any) -> None:
    words = ["DIR=bundle", "SIZE=64M", "TORCH=2.12", "PYTHON=3.13", "WITH=trl", "WITHOUT=sglang"]
    command = ["make", "--dry-run", "--no-print-directory", "offline-bundle", *words]
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` has its own.
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, check=True)
    passed = packer.parse_arguments(shlex.split(done.stdout.decode().replace("\\\n", "").rpartition("bundle.py")[2]))
    assert (str(passed.dir), passed.size, passed.torch, passed.python) == ("bundle", 64 << 20, "2.12", "3.13")
    assert passed.with_ == ["trl"] and passed.without_sglang


def test_what_is_left_out_is_taken_away_and_may_be_absent_in_another_release(
    packer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packer, "run_uv", lambda *_: (tmp_path / "kernels").mkdir())
    environment = packer.Environment("sglang", (), (), leave_out=("kernels", "moved/*.a"))
    packer.fill_tree(environment, [], packer.Target(PYTHON, TORCH, "13.0", (), {}), tmp_path)
    _, sglang = packer.list_environments(True, [])
    assert "triton" in sglang.options and any("flash" in left_out for left_out in sglang.leave_out)
    assert not (tmp_path / "kernels").exists() and "no moved/*.a to leave out" in capsys.readouterr().out
