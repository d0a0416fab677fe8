"""The house keeps its rooms small and its doors where CONTRIBUTING.md says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSES = {house: sorted((ROOT / house).rglob("*.py")) for house in ("gateway", "trainer")}
FILES = [file for files in HOUSES.values() for file in files]
CODE = [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]

GATEWAY_DOORS = {
    "mcp": ("upstream/", "front/"),
    "mcp_types": ("upstream/", "front/"),
    "httpx2": ("upstream/", "client/", "client.py", "feedback/endpoint.py"),
    "starlette": ("http/", "front/", "trace.py", "serving.py"),
    "uvicorn": ("http/",),
    "typer": ("cli.py",),
    "rich": ("show.py", "check.py"),
    "yaml": ("config/",),
    "prometheus_client": ("http/",),
    "jsonschema_rs": ("schema.py",),
    "PIL": ("media/",),
    "av": ("media/",),
    "numpy": (),
    "asyncio": (),
    "torch": (),
    "transformers": (),
    "trainer": (),
}
TRAINER_DOORS = {
    "torch": (
        "engine/torch/",
        "engine/sglang/",
        "model.py",
        "check.py",
        "engines.py",
        "policy/",
        "learn/",
        "demo/",
        "vision/",
    ),
    "peft": ("policy/",),
    "transformers": ("template/", "engine/torch/", "model.py", "policy/", "demo/", "vision/"),
    "numpy": ("engine/torch/", "policy/"),
    "httpx2": ("engine/sglang/",),
    "safetensors": ("engine/sglang/publish/", "policy/"),
    "sglang": (),
    "datasets": ("data/",),
    "matplotlib": ("view/",),
    "pandas": ("view/",),
    "pyarrow": ("data/",),
    "typer": ("cli/",),
    "rich": ("view/", "check.py", "roll.py", "replay.py", "train/", "cli/"),
    "asyncio": (),
    "mcp": (),
    "starlette": ("page/",),
    "uvicorn": ("page/",),
    "tensorboard": (),
    "tokenizers": ("demo/", "page/"),
    "yaml": (),
}
DOORS = {"gateway": GATEWAY_DOORS, "trainer": TRAINER_DOORS}
"""Who may import a package: heavy ones have one door each."""


def name(file: Path) -> str:
    """Within its house."""
    return file.relative_to(ROOT / file.relative_to(ROOT).parts[0]).as_posix()


@cache
def imports(file: Path) -> tuple[str, ...]:
    """What is imported when it runs, whether at once or later; what only names types costs nothing."""
    return tuple(imported(file))


def imported(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typing = {inner for node in guarded for one in node.body for inner in ast.walk(one)}
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize(("house", "package"), [(house, package) for house in DOORS for package in DOORS[house]])
def test_a_package_is_imported_only_behind_its_door(house: str, package: str) -> None:
    outside = [
        name(file)
        for file in HOUSES[house]
        if any(one.split(".")[0] == package for one in imports(file))
        and not name(file).startswith(DOORS[house][package])
    ]
    assert outside == []


LAYERS = (
    ("ledger", "parse", "thread"),
    ("task", "run", "vision", "engine", "template"),
    ("config", "plug"),
    ("steps", "data"),
    ("grown",),
    ("play",),
    ("room", "groups", "view", "reward"),
    ("stage", "engines", "model", "learn", "swift"),
    ("policy", "demo"),
    ("check", "roll", "replay"),
    ("train",),
    ("page", "verl", "flags"),
    ("cli",),
)
"""Of the trainer, from what a rollout is to what an operator types; nothing knows what is built on it."""


def test_the_trainer_is_built_from_the_ledger_up() -> None:
    level = {room: place for place, rooms in enumerate(LAYERS) for room in rooms}
    upward = [
        f"{name(file)} imports {one}"
        for file in HOUSES["trainer"]
        if name(file) != "__init__.py"
        for one in imports(file)
        if one.startswith("trainer.") and level[one.split(".")[1]] > level[name(file).split("/")[0].split(".")[0]]
    ]
    assert upward == []


def test_only_a_stage_opens_a_gateway() -> None:
    openers = {name(file) for file in HOUSES["trainer"] if {"gateway.gateway", "gateway.client"} & {*imports(file)}}
    assert openers == {"stage.py"}


ORDER = ("types.py", "errors.py", "toolset.py")


@pytest.mark.parametrize("place", range(len(ORDER)))
def test_the_types_know_nothing_of_what_is_built_on_them(place: int) -> None:
    allowed = {f"gateway.{below.removesuffix('.py')}" for below in ORDER[:place]}
    ours = {one for one in imports(ROOT / "gateway" / ORDER[place]) if one.startswith("gateway")}
    assert ours <= allowed


def test_the_types_need_the_standard_library_alone() -> None:
    assert {one.split(".")[0] for one in imports(ROOT / "gateway/types.py")} <= sys.stdlib_module_names


def test_no_room_is_larger_than_the_ceiling() -> None:
    lines = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in CODE}
    assert {file: count for file, count in lines.items() if count > 350} == {}


def test_functions_are_short() -> None:
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths[int(len(lengths) * 0.9)] <= 30
    assert lengths[-1] <= 60


def test_every_room_says_what_it_is_for() -> None:
    silent = [
        name(file) for file in FILES if file.read_text().strip() and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert silent == []


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from gateway.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "names = {'torch', 'transformers', 'mcp', 'starlette', 'pydantic', 'yaml', 'PIL', 'uvicorn'}\n"
        "heavy = names & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.rstrip().endswith("heavy: []")
    assert "serve" in done.stdout and "check" in done.stdout
