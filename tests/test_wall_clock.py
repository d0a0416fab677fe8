"""The wall clock may be set at any time: it is only printed and recorded, and never decides anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_house import FILES, ROOT, tree

WALL_CLOCK = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"datetime", "date", "now", "utcnow", "today"},
}
"""By module, its functions that read the wall clock."""
FILE_TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime"}
RECORDED = {
    "gateway/tracing.py": "start and end of a span",
    "gateway/json_log.py": "the time of a log line",
    "gateway/http/activity.py": "when a call ended, for the live view",
    "gateway/http/state.py": "when a session expires, computed from a monotonic deadline",
    "gateway/http/info_routes.py": "when a server's state began, computed from a monotonic time",
    "gateway/serving.py": "whether a file differs from the one that was read",
    "gateway/mcp_server/call_tasks.py": "when a task was created, as the protocol has it",
    "gateway/mcp_server/resumable_calls.py": "when a task was updated, as the protocol has it",
    "trainer/storage/temporary_folder.py": "a day between two files, both by the clock of their disk",
    "trainer/data/dataset.py": "whether a file differs from the one that was read",
    "trainer/storage/run_status.py": "the age of a status: for the page, and for an evaluation beside a training run",
    "mtrl_plugins/web/runs.py": "when a run changed, for its page",
    "mtrl_plugins/swift/protocol.py": "when a response was created, as the interface has it",
    "mtrl_plugins/environments/host_server.py": "when a response was created, as the interface has it",
    "gateway/mcp_client/auth/token_file.py": "whether a token in a file has expired, which other processes read, too",
    "gateway/mcp_client/auth/token_requests.py": "when a token expires, as other processes read it",
    "mtrl_plugins/agents/chat_dialect.py": "when an answer was created, as the interface has it",
    "mtrl_plugins/agents/responses_dialect.py": "when an answer was created, as the interface has it",
    "trainer/train/reporters.py": "the time of a point in TensorBoard, and the name of its file",
}
"""The files that read it, and what for; a token that seems expired is only renewed.

Durations, deadlines, orders and ages are of `time.monotonic` or numbers."""


def find_uses(file: Path) -> Iterator[str]:
    """The uses of the wall clock in a file."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in FILE_TIMES or node.attr in WALL_CLOCK.get(module, ()):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in WALL_CLOCK:
            yield from (name.name for name in node.names if name.name in WALL_CLOCK[node.module])


def test_wall_clock_is_read_only_where_a_time_is_shown_or_recorded() -> None:
    users = {file.relative_to(ROOT).as_posix() for file in FILES if any(find_uses(file))}
    assert users == RECORDED.keys()
