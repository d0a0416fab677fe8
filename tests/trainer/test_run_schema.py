"""The JSON Schema of run files, by which editors complete and check them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from trainer.cli.options import find_jobs
from trainer.train import run_schema

SCHEMA = json.loads(run_schema.schema_text())
VALIDATOR = jsonschema_rs.validator_for(SCHEMA)


def test_shipped_schema_matches_the_settings() -> None:
    assert run_schema.RUN_SCHEMA.read_text() == run_schema.schema_text(), (
        "run `python -m trainer.train.run_schema --write`"
    )


@pytest.mark.parametrize("file", sorted(find_jobs().values()), ids=lambda file: file.name)
def test_shipped_jobs_match_the_schema(file: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize(
    "content",
    [{"stepz": 1}, {"update": {"learning_rate": 1}}, {"mode": "sync"}, {"prompts": 0}, {"objects": ["x"]}],
)
def test_schema_refuses_what_a_run_would(content: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(content)
