"""The seam: the core without any plug-in, plug-ins that are missing, and one that a third party wrote."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gateway.plugins import SHIPPED, installed_plugins
from mtrl_plugins.demo.facts.facts_tasks import draw_problems
from tests.trainer.train.jobs import demo_model

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).with_name("example")
RUN_FILE = """
model: {model}
data: rows.jsonl
tools: tools
steps: 2
prompts: 2
n: 4
reward: {{components: {{outcome: {{function: outcome}}}}}}
template: {{sanity: ignore_strippable}}
limits: {{assistant_turns: 6, turn_tokens: 40, rollout_tokens: 200}}
algorithm: {{name: grpo}}
update: {{lr: 1.0e-3}}
evaluation: {{every: 0, rows: 4}}
"""


COMMAND = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
from trainer.cli import main
main()
"""
"""`mtrl-train` without the hook of an editable installation, which finds plug-ins wherever the packages are."""


def run_command(folder: Path, *words: object, code: int = 0, path: Sequence[Path] = ()) -> str:
    """Runs `mtrl-train` with the packages that lie in `folder` or `path`; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *path))), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages without the folders of plug-ins, beside the files of a job."""
    folder = tmp_path_factory.mktemp("core")
    for package in ("gateway", "trainer"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mtrl_plugins").mkdir()
    shutil.copy(ROOT / "mtrl_plugins" / "__init__.py", folder / "mtrl_plugins")
    write_job(folder)
    return folder


def write_job(folder: Path) -> None:
    """The default job with a model, tasks and tools from files: a native class and a stdio MCP server."""
    tools = folder / "tools"
    tools.mkdir()
    shutil.copy(ROOT / "mtrl_plugins" / "demo" / "facts" / "lookup.py", tools / "look_up.py")
    shutil.copy(ROOT / "tool_configs" / "servers" / "calculator.py", tools)
    (tools / "tools.yaml").write_text("tools: [{class_name: look_up.LookUp}, {server: calculator}]\n")
    server = {"command": sys.executable, "args": ["tools/calculator.py"], "cwd": "."}
    (folder / "mcp_servers.json").write_text(json.dumps({"mcpServers": {"calculator": server}}))
    problems = [problem for problem, _ in zip(draw_problems(0, kinds=("fact", "sum")), range(8), strict=False)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(to_row(problem.task)) + "\n" for problem in problems))
    (folder / "run.yaml").write_text(RUN_FILE.format(model=demo_model()))


def to_row(task: object) -> Mapping[str, object]:
    """A demo's task as a row of a file."""
    row = {"id": task.id, "messages": task.messages, "ground_truth": task.truth}  # type: ignore[attr-defined]
    create = {name: {"create_kwargs": dict(given)} for name, given in task.session_task.create.items()}  # type: ignore[attr-defined]
    return {**row, "tools_kwargs": create}


def test_core_trains_to_the_same_weights_without_any_plugin(core: Path, tmp_path: Path) -> None:
    run_command(core, "--config", "run.yaml", "--out", "run")
    write_job(tmp_path)
    run_command(tmp_path, "--config", "run.yaml", "--out", "run", path=[ROOT])
    bare, whole = (
        (folder / "run" / "checkpoints" / "000002" / "model.safetensors").read_bytes() for folder in (core, tmp_path)
    )
    assert bare == whole
    steps = [json.loads(line) for line in (core / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(step.get("reward/std", 0) or step.get("update/grad_norm", 0) for step in steps), "nothing was learned"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--config", "agent.yaml"), "`agent:` needs the plug-in `agents`"),
        (("--config", "workers.yaml"), "`rollout:` needs the plug-in `workers`"),
        (("--data", "demo", "--model", "demo"), "'demo' needs the plug-in 'demo'"),
        (("--environment", "gymnasium:X", "--model", "m"), "`environment:` needs the plug-in `environments`"),
        (("--swift", "train.sh"), "--swift needs the plug-in 'scripts'"),
        (("--config", "run.yaml", "--ray", "auto"), "--ray needs the plug-in 'cluster'"),
    ],
)
def test_what_needs_a_missing_plugin_names_it(core: Path, words: Sequence[str], problem: str) -> None:
    run = (core / "run.yaml").read_text()
    (core / "agent.yaml").write_text(run + "agent: {command: [my-agent]}\n")
    (core / "workers.yaml").write_text(run + "rollout: {workers: 2}\n")
    assert problem in " ".join(run_command(core, *words, "--out", "not-made", code=2).replace("│", " ").split())


def test_table_of_shipped_plugins_has_what_each_of_them_adds() -> None:
    for plugin in installed_plugins():
        if not plugin.name.startswith("dice"):
            sections = {*plugin.run_sections, *plugin.train_sections, *plugin.sandboxes, *plugin.examples}
            assert sections <= {*SHIPPED.get(plugin.name, ())}, plugin.name
    names = {entry.name for entry in (ROOT / "mtrl_plugins").iterdir() if (entry / "plugin.py").is_file()}
    assert names == {plugin.name for plugin in installed_plugins()} and {*SHIPPED} <= names


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example plug-in, installed as a third party's package is."""
    source, folder = tmp_path_factory.mktemp("source") / "dice", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=240)
    return folder


def test_plugin_of_a_third_party_adds_a_section_and_a_command(dice: Path, tmp_path: Path) -> None:
    assert run_command(tmp_path, "dice", "--sides", 4, path=[dice, ROOT]).strip() in "1234"
    (tmp_path / "run.yaml").write_text(f"model: {demo_model()}\ndata: dice\ndice: {{sides: 20}}\n"
                                       "reward: {components: {tools: {function: tools}}}\n")  # fmt: skip
    printed = run_command(tmp_path, "--config", "run.yaml", "--dry-run", path=[dice, ROOT])
    assert "8 tasks of dice" in printed and "dice with 20 sides are rolled" in printed and "dice: sides 20" in printed
    (tmp_path / "run.yaml").write_text(f"model: {demo_model()}\ndata: dice\ndice: {{side: 20}}\n")
    assert "did you mean `sides`?" in run_command(tmp_path, "--config", "run.yaml", code=2, path=[dice, ROOT])


MAX_LINES = 30_000
"""Of ours that a job without plug-ins may import."""
COUNT = """
import sys
import trainer.train.start
ours = [module.__file__ for name, module in [*sys.modules.items()] if name.partition(".")[0] in sys.argv[1:]]
print(sum(len(open(file).readlines()) for file in ours if file))
"""


def test_start_of_a_run_imports_a_third_of_the_product_at_most() -> None:
    command = [sys.executable, "-c", COUNT, "gateway", "trainer", "mtrl_plugins"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) <= MAX_LINES


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("PLUGIN =", "1 / 0\nPLUGIN ="), "the plug-in 'dice' cannot be loaded: ZeroDivisionError"),
        (("PLUGIN = Plugin(", "PLUGIN = dict("), "the plug-in 'dice' is no gateway.plugins.Plugin, but a dict"),
        (('{"dice":', '{"agent":'), "the plug-in 'dice' adds what another one adds, too: agent"),
    ],
)
def test_broken_plugin_is_named_with_its_package(
    dice: Path, tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(dice, broken)
    module = broken / "mtrl_dice" / "plugin.py"
    module.write_text(module.read_text().replace(*change))
    code = 2 if "adds what" in problem else 1
    printed = run_command(tmp_path, "--config", "none.yaml", code=code, path=[broken, ROOT])
    assert problem in printed and "uninstall" in printed and "Traceback" not in printed


def test_plugin_modules_import_only_the_registry() -> None:
    for file in (ROOT / "mtrl_plugins").glob("*/plugin.py"):
        imported = {node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}
        assert imported <= {"gateway.plugins", "pathlib"}, file
