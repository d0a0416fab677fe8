"""Which tests a module needs: `make mutants FILE=trainer/rollout/admission.py [TESTS=tests/trainer/test_scheduler.py]`.

Changes one operator, constant, condition or return of the module at a time, runs the tests against each change, and
tells which changes no test notices, and which tests notice nothing that others do not. Tests are by default all files
that name the module.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "trainer", "mtrl_plugins", "tests", "tool_configs")
SWAPS: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A changed module."""

    line: int
    change: str
    text: str


def make_mutants(source: str) -> Iterator[Mutant]:
    """Every change of the module, one at a time."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = next(other for place, other in enumerate(ast.walk(mutated)) if place == index)
            before = ast.unparse(node)
            _apply(target, change)
            yield Mutant(
                getattr(node, "lineno", 0), f"{before[:50]} -> {ast.unparse(target)[:50]}", ast.unparse(mutated)
            )


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield "compare"
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPS:
        yield "operator"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield "constant"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return"


def _apply(node: ast.AST, change: str) -> None:
    if isinstance(node, ast.Compare) and change == "compare":
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)


def find_tests(file: Path) -> list[str]:
    """The test files that import the module."""
    module = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return [
        str(test.relative_to(ROOT))
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if module in test.read_text()
    ]


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> set[str] | None:
    """The tests that fail; None if they do not end, or nothing can be collected."""
    report = tree / "report.jsonl"
    report.unlink(missing_ok=True)
    (tree / "conftest_mutants.py").write_text(
        "import json\n"
        "def pytest_runtest_logreport(report):\n"
        "    if report.failed:\n"
        f"        with open({str(report)!r}, 'a') as out:\n"
        "            out.write(json.dumps(report.nodeid) + '\\n')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest_mutants", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode not in (0, 1):
        return None
    return {json.loads(line) for line in report.read_text().splitlines()} if report.exists() else set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--most", type=int, default=60, help="how many mutants are tried, evenly spaced")
    parser.add_argument("--limit-s", type=float, default=300.0)
    options = parser.parse_args()
    file = (ROOT / options.file).resolve()
    tests = options.tests or find_tests(file)
    mutants = list(make_mutants(file.read_text()))
    mutants = mutants[:: max(1, -(-len(mutants) // options.most))]
    print(f"{len(mutants)} mutants of {options.file}, {len(tests)} test files")
    killers: dict[int, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in PACKAGES:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "mcp_servers.json"):
            shutil.copy(ROOT / name, tree)
        if run_tests(tree, tests, options.limit_s) != set():
            sys.exit(f"the tests do not pass within {options.limit_s:g} s without a change: name fewer")
        for number, mutant in enumerate(mutants):
            (tree / file.relative_to(ROOT)).write_text(mutant.text)
            failed = run_tests(tree, tests, options.limit_s)
            killers[number] = {"(does not end, or does not load)"} if failed is None else failed
            if not killers[number]:
                print(f"survives  line {mutant.line}: {mutant.change}", flush=True)
    needed = _choose_tests(killers)
    print(f"{sum(map(bool, killers.values()))} of {len(mutants)} are noticed; these tests suffice:")
    for test in needed:
        print(f"  {test}")


def _choose_tests(killers: dict[int, set[str]]) -> list[str]:
    """Few tests that notice all that any test notices, those that notice most first."""
    open_mutants = {number for number, tests in killers.items() if tests}
    chosen: list[str] = []
    while open_mutants:
        noticed = Counter(test for number in open_mutants for test in killers[number])
        best = max(sorted(noticed), key=noticed.__getitem__)
        chosen.append(f"{best}: {noticed[best]} more")
        open_mutants -= {number for number in open_mutants if best in killers[number]}
    return chosen


if __name__ == "__main__":
    main()
