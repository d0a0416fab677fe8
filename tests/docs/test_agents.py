"""Every block of docs/agents.md does what it says; a small program stands in for codex."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.conftest import Follow
from trainer.rollout.rollout import StopReason
from trainer.storage.rollout_file import Rollouts

CODEX = f"""#!{sys.executable}
import json, os, sys, tomllib, urllib.request
assert sys.argv[1:3] == ["exec", "--skip-git-repo-check"], sys.argv
with open(os.path.join(os.environ["CODEX_HOME"], "config.toml"), "rb") as file:
    config = tomllib.load(file)
provider = config["model_providers"][config["model_provider"]]
headers = {{"Authorization": "Bearer " + os.environ[provider["env_key"]], "Content-Type": "application/json"}}
body = json.dumps({{"model": config["model"], "input": sys.argv[3]}}).encode()
answer = urllib.request.urlopen(urllib.request.Request(provider["base_url"] + "/responses", body, headers), timeout=60)
print(json.load(answer)["status"])
"""


def test_agents_page(follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "codex").write_text(CODEX)
    (programs / "codex").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin")
    done = follow("docs/agents.md", no_servers=True)
    assert "4 of 4 rollouts" in done["--config my_agent/function.yaml"] and "task sum-" in done["show runs/look 0"]
    for run, count in (("look", 4), ("codex", 2), ("external", 4)):
        rollouts = [*Rollouts(Path("runs") / run)]
        assert len(rollouts) == count, run
        assert {rollout.stop for rollout in rollouts} <= {StopReason.DONE, StopReason.LENGTH_ROLLOUT}, run
        assert all(rollout.turns for rollout in rollouts)
    assert all("agent" in rollout.rewards for run in ("look", "external") for rollout in Rollouts(Path("runs") / run))
    assert Path("runs/run/metrics.jsonl").is_file() and not Path("my_agent/address.json").exists()
