"""Import paths of earlier versions still work, with a warning that names the new path."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gateway.old_names import RENAMED

OLD_IMPORT = """
import importlib, sys, warnings
old, new = sys.argv[1:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    module = importlib.import_module(old)
assert module is importlib.import_module(new)
assert module.__spec__.name == new
assert any(warning.category is FutureWarning and new in str(warning.message) for warning in caught), caught
"""


@pytest.mark.parametrize("old", RENAMED)
def test_old_import_path_is_the_renamed_module_and_warns(old: str) -> None:
    command = [sys.executable, "-c", OLD_IMPORT, old, RENAMED[old]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_users_import_from_an_old_path_works() -> None:
    code = "from gateway.upstream.hook import MCPBaseTool; print(MCPBaseTool.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "gateway.mcp_client.parse_hook"
    assert "gateway.upstream.hook was renamed: import gateway.mcp_client.parse_hook" in done.stderr


def test_renamed_modules_are_not_imported_with_the_package() -> None:
    code = f"import sys, gateway, trainer; sys.exit(any(name in sys.modules for name in {list(RENAMED.values())}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
