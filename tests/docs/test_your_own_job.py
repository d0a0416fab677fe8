"""Every block of docs/your-own-job.md does what it says, from an empty folder to an exported model."""

from __future__ import annotations

from pathlib import Path

from tests.docs.conftest import Follow


def test_your_own_job(follow: Follow) -> None:
    done = follow("docs/your-own-job.md")
    assert "count" in done["mtrl-gateway list"] and "feedback_customer" in done["mtrl-gateway list"]
    assert "4 of 4 rollouts" in done["mtrl-train rollout"] and "torch engine" in done["mtrl-train rollout"]
    assert "shop-0" in done["show runs/look "] and "not trained" in done["why runs/look"]
    assert "0 of them differ" in done["replay runs/look"]
    assert "no problems found" in done["--dry-run"]
    assert Path("models/shop-assistant/model.safetensors").is_file()
