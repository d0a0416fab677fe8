"""Structure of the code: layers, import rules for heavy packages and plug-ins, names and docstrings."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import RolloutWriter

ROOT = Path(__file__).parent.parent
USER_FILES = ROOT / "mtrl_plugins" / "starter" / "job"
"""What `mtrl-train init` writes: files of a user, which import what users import."""
MODULES = {
    package: sorted(file for file in (ROOT / package).rglob("*.py") if not file.is_relative_to(USER_FILES))
    for package in ("gateway", "mtrl_plugins", "trainer")
}
FILES = [file for files in MODULES.values() for file in files]
CODE = [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]

GATEWAY_IMPORTS = {
    "mcp": ("mcp_client/", "mcp_server/"),
    "mcp_types": ("mcp_client/", "mcp_server/"),
    "httpx2": ("mcp_client/", "client.py", "feedback/simulated.py"),
    "starlette": ("http/", "mcp_server/", "tracing.py", "serving.py"),
    "uvicorn": ("http/",),
    "typer": ("cli.py", "plugin_commands.py"),
    "rich": ("terminal.py", "check.py", "finding.py"),
    "yaml": ("config/",),
    "prometheus_client": ("http/",),
    "jsonschema_rs": ("schema.py",),
    "PIL": ("media/",),
    "av": ("media/",),
    "numpy": (),
    # anyio cannot tell whether a task was cancelled, or its code only says so.
    "asyncio": ("user_code.py", "http/uvicorn_server.py"),  # Accepted sockets are its own.
    "torch": (),
    "transformers": (),
    "trainer": (),
    "mtrl_plugins": (),
}
TRAINER_IMPORTS = {
    "torch": (
        "engine/torch/",
        "engine/sglang/",
        "engine/host_copies.py",
        "model.py",
        "check.py",
        "engines.py",
        "policy/",
        "algorithms/",
        "vision/",
        "distributed/",
    ),
    "peft": ("policy/", "pretrained.py"),
    "transformers": ("engine/torch/", "model.py", "policy/", "pretrained.py", "vision/", "distributed/"),
    "numpy": ("engine/torch/", "policy/"),
    "httpx2": ("engine/sglang/",),
    "safetensors": ("engine/sglang/weight_sync/", "policy/", "distributed/"),
    "sglang": (),
    "datasets": ("data/",),
    "pyarrow": ("data/",),
    "typer": ("cli/",),
    "rich": ("view/", "collect_rollouts.py", "replay_rollouts.py", "train/", "cli/"),
    "asyncio": (),
    "mcp": (),
    "starlette": (),
    "uvicorn": (),
    "tensorboard": ("train/reporters.py",),
    "tokenizers": (),
    "yaml": (),
    "mtrl_plugins": (),
}
PLUGIN_IMPORTS = {
    "torch": ("demo/",),
    "transformers": ("demo/", "trl/"),
    "httpx2": ("agents/demo_agent.py", "sandboxes/"),
    "asyncio": ("environments/host_",),  # They run where only it is there.
    "mcp": (),
    "starlette": ("agents/", "sandboxes/", "web/"),
    "uvicorn": ("agents/", "sandboxes/", "web/"),
    "tokenizers": ("demo/", "web/", "verl/conversions"),
    "websockets": ("environments/",),
    "yaml": ("cluster/",),
    "ray": (),  # looked up by name where it is installed: it has an environment of its own in tests
    "sglang": (),
}
ALLOWED_IMPORTS = {"gateway": GATEWAY_IMPORTS, "mtrl_plugins": PLUGIN_IMPORTS, "trainer": TRAINER_IMPORTS}
"""Which folders and files may import a third-party package; heavy packages are imported in few places."""
SHARED_NAMES = {"__init__", "base", "cli", "errors", "settings", "table"}
"""File names that may occur more than once in a package, since they mean the same in each folder."""


def name(file: Path) -> str:
    """The path of a file within its package."""
    return file.relative_to(ROOT / file.relative_to(ROOT).parts[0]).as_posix()


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> tuple[str, ...]:
    """The modules that a file imports at run time, at its top or in functions; those for type checking do not count."""
    guarded = [
        node for node in ast.walk(tree(file)) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    typing = {inner for node in guarded for statement in node.body for inner in ast.walk(statement)}
    return tuple(module for node in ast.walk(tree(file)) if node not in typing for module in imported_by(node))


def imported_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module


@pytest.mark.parametrize(
    ("package", "imported"),
    [(package, imported) for package in ALLOWED_IMPORTS for imported in ALLOWED_IMPORTS[package]],
)
def test_third_party_packages_are_imported_only_where_allowed(package: str, imported: str) -> None:
    outside = [
        name(file)
        for file in MODULES[package]
        if any(module.split(".")[0] == imported for module in imports(file))
        and not name(file).startswith(ALLOWED_IMPORTS[package][imported])
    ]
    assert outside == []


GATEWAY_LAYERS = (
    ("types", "errors", "version", "bounded_json", "large_json", "disk_errors", "policy_text", "process_exit"),
    ("finding", "json_log", "plural"),
    ("import_hook", "relative_imports", "loop_watchdog", "schema_budget", "server_start", "web", "config.base"),
    ("line_file", "plugins", "process", "schema", "toolset", "user_code"),
    ("await_user_code", "config.sections", "plugin_commands", "session_protocols", "state", "wire"),
    ("sandbox.host_rules", "sandbox.sandbox_layout", "sandbox.provider_settings", "sandbox.sandbox_environment"),
    ("sandbox.grade_files",),
    ("sandbox.sandbox_settings", "sandbox.grade_settings"),
    ("sandbox.sandbox_paths",),
    ("config",),
    ("elicitation", "media", "truncate"),
    ("chat_messages", "limits", "terminal"),
    ("sandbox", "tool_table"),
    ("native",),
    ("argument_checks", "feedback", "mcp_client"),
    ("build", "isolation_check", "session"),
    ("client", "gateway", "login", "tracing"),
    ("check", "http", "tape"),
    ("mcp_server",),
    ("serving",),
    ("cli",),
)
TRAINER_LAYERS = (
    ("ledger", "parse", "worker_thread", "load_plugin", "pretrained", "hub"),
    ("rollout.task", "rollout.rollout", "storage", "vision", "engine", "template"),
    ("rollout.run_part",),
    ("rollout.settings",),
    ("rollout.steppers", "data"),
    ("rollout.ledger_builder", "rollout.observer"),
    ("rollout.loop",),
    ("rollout", "view", "reward"),
    ("setup", "engines", "model", "weight_files", "algorithms"),
    ("policy",),
    ("distributed",),
    ("collect_rollouts", "replay_rollouts"),
    ("train",),
    ("cli",),
)
LAYERS = {"gateway": GATEWAY_LAYERS, "trainer": TRAINER_LAYERS}
"""Layers, lowest first: a module imports only from its own layer and from those below it."""


def layer(module: str) -> int:
    """The layer of `trainer.a.b`: that of `a.b` where it has one of its own, else that of `a`."""
    house, _, inside = module.partition(".")
    level = {room: height for height, rooms in enumerate(LAYERS[house]) for room in rooms}
    package, _, rest = inside.partition(".")
    return level.get(f"{package}.{rest}", level[package])


@pytest.mark.parametrize("house", LAYERS)
def test_modules_import_only_from_their_own_layer_or_below(house: str) -> None:
    upward = [
        f"{name(file)} imports {module}"
        for file in MODULES[house]
        if name(file) != "__init__.py"
        for module in imports(file)
        if module.startswith(f"{house}.") and layer(module) > layer(module_of(file))
    ]
    assert upward == []


def test_only_one_module_lets_transformers_read_a_folder() -> None:
    """The module decides whether code of the folder may run; left to itself, transformers asks at the terminal."""
    readers = {
        name(file)
        for file in FILES
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "get_class_from_dynamic_module")
    }
    assert readers == {"pretrained.py"}


def test_only_setup_opens_a_gateway() -> None:
    openers = {name(file) for file in MODULES["trainer"] if {"gateway.gateway", "gateway.client"} & {*imports(file)}}
    assert openers == {"setup.py"}


STARTS_OF_PROCESSES = frozenset({"Popen", "open_process", "run_process", "fork", "killpg", "create_subprocess_exec"})
"""What starts and ends processes; also the functions of `subprocess` that run a command."""
COMMANDS = frozenset({"run", "call", "check_call", "check_output"})
OUTSIDE_THE_ROOM = {
    "gateway/sandbox/command_server.py": "runs alone inside a sandbox, where what it starts is all that there is",
    "gateway/sandbox/root_entry.py": "a script that runs alone: the first process of a box stays root's",
    "gateway/sandbox/state_mount.py": "a script that runs alone: a child holds a namespace of users open",
}
"""Files that start or end processes themselves, and why."""


def process_calls(file: Path) -> Iterator[str]:
    """The calls in a file that start processes or end their groups."""
    for node in ast.walk(tree(file)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        owner = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
        if name in STARTS_OF_PROCESSES or (owner == "subprocess" and name in COMMANDS):
            yield f"{owner}.{name}".lstrip(".")


def test_one_room_starts_and_ends_processes() -> None:
    files = [file for file in FILES if not file.is_relative_to(ROOT / "gateway" / "process")]
    found = {file.relative_to(ROOT).as_posix() for file in files if [*process_calls(file)]}
    assert found == OUTSIDE_THE_ROOM.keys()


MAX_ROOM_LINES = 1500


def test_process_room_is_small() -> None:
    assert (
        sum(len(file.read_text().splitlines()) for file in (ROOT / "gateway" / "process").glob("*.py"))
        <= MAX_ROOM_LINES
    )


BASE_MODULES = ("types.py", "errors.py", "toolset.py")
"""Of the gateway, lowest first: each imports only those before it."""


@pytest.mark.parametrize("index", range(len(BASE_MODULES)))
def test_gateway_base_modules_import_nothing_built_on_them(index: int) -> None:
    allowed = {f"gateway.{below.removesuffix('.py')}" for below in BASE_MODULES[:index]}
    ours = {module for module in imports(ROOT / "gateway" / BASE_MODULES[index]) if module.startswith("gateway")}
    assert ours <= allowed


def test_gateway_types_import_only_the_standard_library() -> None:
    assert {module.split(".")[0] for module in imports(ROOT / "gateway/types.py")} <= sys.stdlib_module_names


def module_of(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


KNOWN = frozenset(map(module_of, FILES))


def top_level_imports(file: Path) -> set[str]:
    """The modules of ours that a file imports as it is loaded."""
    blocks = [tree(file), *(node for node in tree(file).body if isinstance(node, ast.Try))]
    found = set()
    for node in (statement for block in blocks for statement in block.body):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & KNOWN) or ({node.module} & KNOWN)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module_of(file): top_level_imports(file) for file in FILES}
    while free := {module for module, needed in graph.items() if not needed & graph.keys()} or (
        graph.keys() - {module for needed in graph.values() for module in needed}
    ):
        graph = {module: needed for module, needed in graph.items() if module not in free}
    assert sorted(graph) == [], "these import each other in a circle"


@pytest.mark.parametrize("package", ["gateway", "trainer"])
def test_module_names_are_unique_within_a_package(package: str) -> None:
    names = Counter(file.stem for file in MODULES[package] if file.stem not in SHARED_NAMES and file.stem != "__main__")
    assert [stem for stem, count in names.items() if count > 1] == []


def test_every_public_module_class_and_function_has_a_docstring() -> None:
    missing = []
    for file in FILES:
        public = [
            node
            for node in tree(file).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        ]
        missing += [f"{name(file)}: {node.name}" for node in public if not ast.get_docstring(node)]
        missing += [name(file)] if not ast.get_docstring(tree(file)) else []
    assert missing == []


PRIVATE_WORDS = frozenset({"told", "said", "anew", "begun", "whoever", "eyes", "film", "films", "lesson"})
"""Words of an earlier vocabulary; docs/glossary.md has those that are used instead."""


PLURALS = re.compile(r"""['"]s['"] ?(\[|\*|if)|else ['"]s['"]|\{len\([^{}]*\)\} (files|tools|rows|tasks|steps)\b""")


def test_counts_in_messages_are_singular_or_plural_by_one_function() -> None:
    files = [file for name in ("gateway", "trainer", "mtrl_plugins") for file in (ROOT / name).rglob("*.py")]
    own = ROOT / "gateway/plural.py"
    found = [file for file in files if file != own and PLURALS.search(file.read_text())]
    assert not found and PLURALS.search(own.read_text()), found


def test_names_are_the_glossarys_words() -> None:
    found = set()
    for file in FILES:
        is_suspect = any(word in f"{file.stem} {file.read_text()}".lower() for word in PRIVATE_WORDS)
        for node in ast.walk(tree(file)) if is_suspect else ():
            names = [getattr(node, "name", None), getattr(node, "arg", None), getattr(node, "attr", None), file.stem]
            names += [node.id] if isinstance(node, ast.Name) else []
            words = ((each, set(each.lower().split("_"))) for each in names if isinstance(each, str))
            found |= {f"{name(file)}: {each}" for each, parts in words if parts & PRIVATE_WORDS}
    assert found == set()


HEAVY = (
    "PIL", "aiohttp", "anyio", "httpx2", "jinja2", "jsonschema_rs", "mcp", "numpy", "peft", "pydantic", "starlette",
    "tokenizers", "torch", "transformers", "uvicorn", "yaml",
)  # fmt: skip
MAX_OWN_MODULES = 80
"""Of our own that `--help` may import: the commands' files and what their signatures name."""


@pytest.mark.parametrize("package", ["gateway", "trainer"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(package: str, arguments: list[str]) -> None:
    own = ("gateway", "mtrl_plugins", "trainer")
    found = imported_for(f"{package}.cli", arguments, (*HEAVY, *own))
    assert [name for name in found if name.partition(".")[0] not in own] == []
    assert len(found) <= MAX_OWN_MODULES


def test_show_imports_no_model_and_no_progress_panels(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add(Rollout("task", Ledger((Entry(Author.TASK, (1, 2)),)), StopReason.DONE, "1-0-0", 0))
    late = (*(name for name in HEAVY if name not in ("anyio", "jsonschema_rs", "pydantic")), "trainer.view.panel")
    assert imported_for("trainer.cli", ["show", str(tmp_path)], late) == []


def test_a_gateway_that_listens_has_loaded_no_library_of_models(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: []")
    command = [sys.executable, "-m", "gateway.cli", "serve", "--tools", str(tmp_path / "tools.yaml"), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        with_timeout = threading.Timer(120, process.kill)
        with_timeout.start()
        line = process.stdout.readline()
        loaded = " ".join(each.path for each in psutil.Process(process.pid).memory_maps()) if line else ""
        with_timeout.cancel()
        process.kill()
    assert "http://" in line and "pydantic_core" in loaded, line
    assert [each for each in ("aiohttp", "numpy", "tokenizers", "torch") if f"/{each}/" in loaded] == []


def imported_for(module: str, arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """The modules below `names` that a command imports."""
    code = (
        "import sys\n"
        f"from {module} import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"names = {names!r}\n"
        "below = tuple(name + '.' for name in names)\n"
        "print('\\n' + repr([each for each in sys.modules if (each + '.').startswith(below)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


MAX_HOPS = 7
"""Functions of ours from the command to the optimizer: `main`, the command `train`, `start.train`, `TrainLoop.run`,
`WorkerThread.run` to the thread, and there `PolicyUpdater.train_step` and `Policy.step`."""
COUNT_HOPS = f"""
import sys, threading, traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path({str(ROOT)!r})
PACKAGES = {{ROOT / name for name in ("gateway", "mtrl_plugins", "trainer")}}
submit, step, callers = ThreadPoolExecutor.submit, torch.optim.AdamW.step, {{}}

def own_frames():
    places = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
    return [f"{{file.relative_to(ROOT)}}:{{name}}" for file, name in places if PACKAGES & {{*file.parents}}]

def submit_followed(pool, function, *arguments):
    above = own_frames()
    def run():
        callers[threading.get_ident()] = above
        return function(*arguments)
    return submit(pool, run)

def step_counted(optimizer, *arguments):
    print("HOPS", *callers.get(threading.get_ident(), []), *own_frames())
    return step(optimizer, *arguments)

ThreadPoolExecutor.submit, torch.optim.AdamW.step = submit_followed, step_counted
from trainer.cli import main
main()
"""


def test_command_reaches_the_optimizer_in_few_functions(tmp_path: Path) -> None:
    from mtrl_plugins.demo.facts.facts_demo import build_model  # imports torch
    from tests.trainer.processes import run_process
    from tests.trainer.train.jobs import SMALL

    rewards = {"components": {"sevenths": {"function": f"{ROOT}/tests/trainer/train/sevenths.py:sevenths"}}}
    job = {
        **SMALL,
        "model": str(build_model(tmp_path / "model")),
        "steps": 1,
        "reward": rewards,
        "evaluation": {"every": 0, "after": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(job))
    (tmp_path / "count.py").write_text(COUNT_HOPS)
    with run_process(tmp_path, "count.py", "--config", "run.yaml", "--out", "run") as process:
        output, _ = process.communicate(timeout=240)
    found = [line.split()[1:] for line in output.splitlines() if line.startswith("HOPS")]
    hops = next((hops for hops in found if hops[-1] == "trainer/policy/policy.py:step"), None)
    assert hops is not None and hops[0] == "trainer/cli/__init__.py:main", output
    assert len(hops) <= MAX_HOPS, hops


def test_scripts_of_bench_find_the_packages_and_not_files_of_the_same_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for script in sorted((ROOT / "bench").glob("*.py")):
        text = script.read_text()
        is_run_by_path = f"bench/{script.name}" in makefile or f"python bench/{script.name}" in text
        if is_run_by_path and re.search(r"^from (gateway|trainer|mtrl_plugins)[. ]", text, re.MULTILINE):
            assert "sys.path[:0] = [" in text or "sys.path.insert(0, " in text, script.name
