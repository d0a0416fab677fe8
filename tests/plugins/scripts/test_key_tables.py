"""The tables of verl, ms-swift and TRL: every key does what its row says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.scripts.key_table import Effect, KeyTable, PlacedValue, Rule
from mtrl_plugins.scripts.translate import format_report, format_table, translate
from mtrl_plugins.swift.conversions import SWIFT_TABLE
from mtrl_plugins.trl.conversions import TRL_TABLE
from mtrl_plugins.verl.conversions import VERL_TABLE
from trainer.train.settings import TrainSettings

MINIMAL: dict[str, dict[str, Any]] = {
    "verl": {"actor_rollout_ref.model.path": "m", "data.train_files": "org/rows", "algorithm.adv_estimator": "grpo",
             "trainer.total_training_steps": 4, "custom_reward_function.path": "r.py",
             "actor_rollout_ref.rollout.n": 8},
    "ms-swift": {"rlhf_type": "grpo", "model": "m", "dataset": "rows.jsonl", "reward_funcs": "format", "max_steps": 4,
                 "per_device_train_batch_size": 8},
    "TRL": {"max_steps": 4},
}  # fmt: skip
TABLES = pytest.mark.parametrize("table", [VERL_TABLE, SWIFT_TABLE, TRL_TABLE], ids=lambda table: table.framework)
ODD_VALUE = "a value that nobody supports"


def translate_with(table: KeyTable, key: str, value: Any) -> dict[str, Any]:
    keys = MINIMAL[table.framework] | {key: value}
    return dict(translate({key: PlacedValue(value, "run.sh:3") for key, value in keys.items()}, table).settings)


def written_keys(rules: Iterator[Rule]) -> Iterator[tuple[str, Rule]]:
    """The keys of rules in each spelling; one below each `*`."""
    return ((name.replace("*", "some"), rule) for rule in rules for name in rule.names)


@TABLES
def test_keys_are_unique_and_their_settings_exist(table: KeyTable) -> None:
    names = [name for rule in table.rules for name in rule.names]
    assert len(names) == len(set(names))
    for rule in table.rules:
        fields: Any = TrainSettings.model_fields
        for step in filter(None, rule.setting.split(".")):
            assert step in fields, rule.setting
            inner = fields[step].annotation
            inner = inner if isinstance(inner, type) else inner.__args__[0]
            fields = getattr(inner, "model_fields", {})
        assert rule.note or rule.setting or rule.effect is Effect.FIXED, rule.name
    lines = format_table(table).splitlines()
    assert len(lines) == len(table.rules) + 2
    assert all(line.startswith("| ") and line.endswith(" |") for line in (lines[0], *lines[2:]))


@TABLES
def test_every_key_that_may_only_have_some_values_refuses_others_at_its_place(table: KeyTable) -> None:
    limited = (rule for rule in table.rules if getattr(rule.convert, "__name__", "") == "_allow")
    count = 0
    for key, rule in written_keys(limited):
        if not key.startswith("critic."):  # Only a critic's run reads them.
            with pytest.raises(ConfigError, match=f"run.sh:3: .*{ODD_VALUE}"):
                translate_with(table, key, ODD_VALUE)
            if rule.default is not None and key not in MINIMAL[table.framework]:
                translate_with(table, key, rule.default)
            count += 1
    assert count > 20


@TABLES
def test_ignored_keys_change_no_setting_and_are_reported(table: KeyTable) -> None:
    rules = [rule for rule in table.rules if rule.effect is Effect.IGNORED and rule.convert is None]
    keys = MINIMAL[table.framework]
    expected = translate({key: PlacedValue(value, "args") for key, value in keys.items()}, table).settings
    names = [
        key for key, rule in written_keys(iter(rules)) if table.find_rule(key) is rule and key != "use_vllm"
    ]  # It matters to the mismatch.
    keys = dict.fromkeys(names, ODD_VALUE) | keys
    translation = translate({key: PlacedValue(value, "args") for key, value in keys.items()}, table)
    ignored = format_report(translation).partition("\nIgnored\n")[2]
    assert translation.settings == expected and all(name in ignored for name in names)
