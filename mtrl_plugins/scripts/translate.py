"""Translates another trainer's configuration to a run file: keys to settings, with a report and a table of all keys.

Every key becomes a setting, is reported as ignored, or is rejected with its place; none is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.config.diagnostics import closest_match
from gateway.config.environment import format_loc
from gateway.errors import ConfigError, ConfigErrors
from mtrl_plugins.scripts.key_table import COMMAND_LINE, Effect, Keys, KeyTable, Rule, SourceConfig, UnsupportedValue
from mtrl_plugins.scripts.launches import UNKNOWN_TEXT
from mtrl_plugins.scripts.references import resolve_references
from trainer.train.settings import TrainSettings

SHELL_ONLY = "only a shell can evaluate "
"""The start of the error about a value that cannot be read; no further errors are reported for such a key."""


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """A key of the configuration with its rule, and the value of the setting if it sets one."""

    key: str
    place: str
    rule: Rule
    value: Any


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings for `TrainSettings`, with the keys that they come from."""

    settings: Mapping[str, Any]
    keys: tuple[TranslatedKey, ...]
    sources: Mapping[str, str]
    """The key of each setting."""
    table: KeyTable


def translate(keys: Keys, table: KeyTable) -> Translation:
    """Raises ConfigErrors with all unknown keys and all values that are not supported."""
    errors: list[ConfigError] = []
    config = _collect_keys(keys, table, errors)
    settings: dict[str, Any] = {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for rule in table.rules:
        try:
            value = rule.convert(config[rule.name], config) if rule.convert is not None else config[rule.name]
        except UnsupportedValue as unsupported:
            error = _unsupported_error(rule, config, unsupported, table)
            reported = {(other.field, other.problem) for other in errors}
            unreadable = {other.field for other in errors if other.problem.startswith(SHELL_ONLY)}
            if not (error.field in unreadable or (error.field, error.problem) in reported):
                errors.append(error)
            continue
        if rule.setting and value is not None:
            values[rule.name] = value
            sources[rule.setting] = rule.name
            _set_nested(settings, rule.setting, value)
    for setting, (value, _) in table.extra_settings.items():
        _set_nested(settings, setting, value)
    if not errors:
        errors += _validate_settings(settings, sources, config, table)
    if errors:
        raise ConfigErrors(errors)
    ruled = ((key, placed, table.find_rule(key)) for key, placed in keys.items())
    translated = (
        TranslatedKey(key, placed.place, rule, values.get(rule.name)) for key, placed, rule in ruled if rule is not None
    )
    return Translation(settings, tuple(translated), sources, table)


def _collect_keys(keys: Keys, table: KeyTable, errors: list[ConfigError]) -> SourceConfig:
    """All keys under their canonical names; two spellings of a key must not conflict."""
    collected: Keys = {}
    for key, placed in resolve_references(keys, table.defaults).items():
        rule = table.find_rule(key)
        if rule is None:
            errors.append(_unknown_key_error(key, placed.place, table))
            continue
        if isinstance(placed.value, str) and UNKNOWN_TEXT in placed.value and rule.effect is not Effect.IGNORED:
            problem = f"{SHELL_ONLY}{placed.value.replace(UNKNOWN_TEXT, '$(...)')!r}"
            errors.append(ConfigError(problem, file=placed.place, field=key, remedy="write the value"))
            continue
        name = rule.canonical_name(key)
        if name in collected and placed.value is None:
            continue  # The other spelling has the value.
        is_override = placed.place == COMMAND_LINE and name in collected and collected[name].place != COMMAND_LINE
        if name in collected and collected[name].value not in (None, placed.value) and not is_override:
            problem = f"conflicts with its value at {collected[name].place}"
            errors.append(ConfigError(problem, file=placed.place, field=key, remedy="keep one of them"))
        collected[name] = placed
    return SourceConfig(collected, table.defaults)


def _unknown_key_error(key: str, place: str, table: KeyTable) -> ConfigError:
    near = closest_match(key, [name for name in table.rule_by_name if not name.endswith(".*")])
    remedy = f"did you mean `{near}`?" if near else "remove it if it changes no result, or see `translate --table`"
    return ConfigError("unknown key", file=place, field=key, remedy=remedy)


def _unsupported_error(rule: Rule, config: SourceConfig, unsupported: UnsupportedValue, table: KeyTable) -> ConfigError:
    """The error at the place of the key to correct: the rule's own, or one that its conversion read."""
    key = unsupported.key or rule.name
    placed = config.keys.get(key)
    place = placed.place if placed is not None else next(_places_below(rule, config), table.default_place)
    return ConfigError(unsupported.problem, file=place, field=key, remedy=unsupported.remedy)


def _places_below(rule: Rule, config: SourceConfig) -> Iterator[str]:
    if not rule.name.endswith("*"):
        return iter(())
    stem = rule.name.removesuffix("*")
    return (placed.place for key, placed in config.keys.items() if key.startswith(stem))


def _set_nested(settings: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        settings = settings.setdefault(name, {})
    if isinstance(value, dict) and isinstance(settings.get(last), dict):
        settings[last] |= value
    else:
        settings[last] = value


def _validate_settings(
    settings: Mapping[str, Any], sources: Mapping[str, str], config: SourceConfig, table: KeyTable
) -> Iterator[ConfigError]:
    """Errors of `TrainSettings`, each at the key that its setting comes from."""
    try:
        TrainSettings.model_validate(settings)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            setting = format_loc(detail["loc"])
            source = next((key for name, key in sources.items() if f"{setting}.".startswith(f"{name}.")), "")
            placed = config.keys.get(source)
            problem = detail["msg"].removeprefix("Value error, ") + (f" (here: {setting})" if setting else "")
            place = placed.place if placed is not None else table.default_place
            yield ConfigError(problem, file=place, field=source, remedy="correct the value")


REPORT_SECTIONS = (
    (Effect.SAME, "Same meaning"),
    (Effect.CHANGED, "Different meaning, and why"),
    (Effect.FIXED, "Supported with this value only"),
    (Effect.IGNORED, "Ignored"),
)
PLAIN_SCALAR = re.compile(r"[A-Za-z_][\w./ -]*")
YAML_KEYWORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "none"})


def format_report(translation: Translation) -> str:
    """All keys of the configuration, grouped by what they do here."""
    sections = []
    for effect, title in REPORT_SECTIONS:
        if lines := [f"  {_format_key(key)}" for key in translation.keys if key.rule.effect is effect]:
            sections.append("\n".join([title, *lines]))
    extra = "\n".join(
        f"  {setting}: {_to_yaml_scalar(value)} - {why}"
        for setting, (value, why) in translation.table.extra_settings.items()
    )
    return "\n\n".join([*sections, f"Set in addition\n{extra}"])


def _format_key(key: TranslatedKey) -> str:
    rule = key.rule
    setting = f" -> {rule.setting}: {format_flow_yaml(key.value)}" if rule.setting and key.value is not None else ""
    note = f" - {rule.note}" if rule.note and rule.effect is not Effect.FIXED else ""
    return f"{key.key}{setting} ({key.place}){note}"


def format_run_file(translation: Translation) -> str:
    """The settings as YAML, each with the key that it comes from as a comment."""
    head = f"# Translated from {translation.table.framework}; run it with `mtrl-train --config FILE`.\n"
    return head + "\n".join(_yaml_lines(translation.settings, translation.sources)) + "\n"


def _yaml_lines(tree: Mapping[str, Any], sources: Mapping[str, str], above: str = "") -> Iterator[str]:
    indent = "  " * above.count(".")
    for name, value in tree.items():
        setting = f"{above}{name}"
        source = f"  # {sources[setting]}" if setting in sources else ""
        has_one_source = setting in sources and not any(other.startswith(f"{setting}.") for other in sources)
        if isinstance(value, dict) and value and not has_one_source:
            yield f"{indent}{name}:{source}"
            yield from _yaml_lines(value, sources, f"{setting}.")
        else:
            yield f"{indent}{name}: {format_flow_yaml(value)}{source}"


def format_flow_yaml(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_to_yaml_scalar(name)}: {format_flow_yaml(inner)}" for name, inner in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_flow_yaml(inner) for inner in value) + "]"
    return _to_yaml_scalar(value)


def _to_yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = PLAIN_SCALAR.fullmatch(value) and value == value.strip() and value.lower() not in YAML_KEYWORDS
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def format_table(table: KeyTable) -> str:
    """A Markdown table of all keys: the other trainer's, mtrl's setting, and the differences."""
    rows = [f"| {table.framework} | mtrl | what differs, and why |", "|---|---|---|"]
    for rule in table.rules:
        names = ", ".join(f"`{name}`" for name in rule.names)
        setting = f"`{rule.setting}`" if rule.setting else "-"
        effect = "" if rule.effect is Effect.SAME else f"{rule.effect}: " if rule.note else f"{rule.effect}"
        default = "" if rule.default is None else f" (default there: {format_flow_yaml(rule.default)})"
        rows.append(f"| {names} | {setting} | {effect}{rule.note.replace('|', chr(92) + '|')}{default} |")
    return "\n".join(rows)
