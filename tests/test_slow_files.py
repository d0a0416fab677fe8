"""The list of slow test files: what quick runs leave out, and the order of the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.slow_files import ROOT, SLOW_S, SlowFiles, format_slow_files, read_slow_files


def make_plugin(*options: str, slow: dict[str, float]) -> SlowFiles:
    config = SimpleNamespace(getoption=lambda name: name in options, getini=lambda name: 300)
    return SlowFiles(cast("pytest.Config", config), slow)


def test_listed_files_exist_and_the_longest_is_first() -> None:
    slow = read_slow_files()
    assert slow and [path for path in slow if not (ROOT / path).is_file()] == []
    assert [*slow.values()] == sorted(slow.values(), reverse=True) and min(slow.values()) >= SLOW_S


def test_quick_run_leaves_out_listed_files_and_no_others() -> None:
    slow = {"tests/a/test_slow.py": 20.0}
    quick, whole = make_plugin("--quick", slow=slow), make_plugin(slow=slow)
    assert quick.pytest_ignore_collect(ROOT / "tests/a/test_slow.py")
    for plugin, file in ((quick, "tests/a/test_other.py"), (quick, "tests/a"), (whole, "tests/a/test_slow.py")):
        assert plugin.pytest_ignore_collect(ROOT / file) is None


def test_tests_of_slow_files_come_first_and_stay_in_order() -> None:
    plugin = make_plugin(slow={"tests/long.py": 20.0, "tests/some.py": 10.0})
    names = ("quick::a", "some::a", "long::b", "long::a", "other::a")
    items = [SimpleNamespace(path=ROOT / f"tests/{name.partition('::')[0]}.py", name=name) for name in names]
    plugin.pytest_collection_modifyitems(cast("list[pytest.Item]", items))
    assert [item.name for item in items] == ["long::b", "long::a", "some::a", "quick::a", "other::a"]


def test_tests_of_slow_files_may_take_longer_beside_other_work() -> None:
    markers: dict[str, list[pytest.Mark]] = {"slow": [], "quick": []}

    def make_item(name: str) -> SimpleNamespace:
        def add_marker(marker: pytest.MarkDecorator, append: bool) -> None:
            markers[name].append(marker.mark)

        return SimpleNamespace(path=ROOT / f"tests/{name}.py", add_marker=add_marker)

    items = cast("list[pytest.Item]", [make_item("slow"), make_item("quick")])
    make_plugin(slow={"tests/slow.py": 60.0, "tests/quick.py": 20.0}).pytest_collection_modifyitems(items)
    assert [marker.args for marker in markers["slow"]] == [(600.0,)] and not markers["quick"]


def test_list_is_written_from_the_seconds_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "slow.txt"
    file.write_text(format_slow_files({"tests/b.py": SLOW_S + 1, "tests/a.py": 50.2, "tests/quick.py": SLOW_S / 2}))
    assert [*read_slow_files(file).items()] == [("tests/a.py", 50.0), ("tests/b.py", SLOW_S + 1)]
