"""What a served gateway tells of its sandboxes: starts and their time, refusals, and the limits that were hit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.gateway import Gateway
from gateway.sandbox import sandboxed_command
from gateway.sandbox.sandbox_statistics import STATISTICS
from tests.http.api_client import ApiClient
from tests.http.test_http_metrics import read_metrics
from tests.live_server import live_server_async


async def test_health_and_metrics_tell_of_starts_refusals_and_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("starts", "start_s", "running", "refusals", "without_group"):
        monkeypatch.setattr(STATISTICS, name, 0)
    monkeypatch.setattr(STATISTICS, "limits_hit", type(STATISTICS.limits_hit)())
    entry = {"sandbox_tools": ["python"], "timeout_s": 30, "retries": 0, "sandbox": {"output_bytes": 1000}}
    (tmp_path / "box.yaml").write_text(json.dumps({"tools": [entry]}))
    async with live_server_async(lambda: Gateway.load(tmp_path / "box.yaml", None)) as server:
        client = ApiClient(server.url)
        first, second = await client.begin(), await client.begin()
        await client.call(first, "python", json.dumps({"code": "print('x' * 5000)"}))
        with monkeypatch.context() as patch:
            patch.setattr(sandboxed_command, "find_problem", lambda: "bwrap is not installed")
            await client.call(second, "python", json.dumps({"code": "1"}))
        counts = (await client("GET", "/healthz")).json()["sandboxes"]
        values = read_metrics((await client("GET", "/metrics")).text)
    assert (counts["starts"], counts["running"], counts["refusals"]) == (1, 1, 1) and counts["start_s"] > 0
    assert counts["limits_hit"] == {"output": 1}
    names = ("start_seconds_count", "refusals_total", "limits_hit_total", "start_seconds_sum")
    found = [values[f"mtrl_sandbox_{name}", *(["output"] if "limits" in name else [])] for name in names]
    assert found == [1, 1, 1, pytest.approx(counts["start_s"])]
    assert values["mtrl_sandboxes", ""] == 1
