"""Writes the texts of errors and alarms into the documentation: `python -m tests.docs.message_pages`.

docs/troubleshooting.md has every error between marks, grouped by the part of the code that reports it;
docs/watching.md has every alarm.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from tests.docs.blocks import ROOT
from tests.docs.messages import HOLE, Message, messages, texts_of
from trainer.train import alarms

TROUBLESHOOTING, WATCHING = ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "watching.md"

GROUPS: Mapping[str, Sequence[str]] = {
    "configuration": (
        "gateway/config/",
        "gateway/build.py",
        "gateway/toolset.py",
        "gateway/truncate.py",
        "gateway/cli.py",
        "gateway/tracing.py",
        "trainer/cli/options.py",
        "mtrl_plugins/starter/init_command.py",
        "mtrl_plugins/starter/",
        "trainer/train/settings.py",
        "trainer/algorithms/settings.py",
        "trainer/rollout/settings.py",
        "trainer/reward/settings.py",
        "trainer/data/curriculum.py",
        "trainer/plugins.py",
        "trainer/setup.py",
    ),
    "mcp": (
        "gateway/mcp_client/",
        "gateway/mcp_server/",
        "gateway/check.py",
        "gateway/elicitation.py",
        "gateway/login.py",
        "gateway/state/",
    ),
    "tools": (
        "gateway/native/",
        "gateway/argument_checks.py",
        "gateway/schema.py",
        "gateway/session.py",
        "gateway/tool_table.py",
        "gateway/gateway.py",
        "gateway/wire.py",
    ),
    "interactions": ("gateway/feedback/", "gateway/sandbox/"),
    "http": ("gateway/http/", "gateway/client.py", "gateway/web/"),
    "media": ("gateway/media/", "trainer/vision/", "trainer/data/row_media.py"),
    "tape": ("gateway/tape/", "trainer/replay_rollouts.py", "trainer/train/replay_step.py"),
    "data": ("trainer/data/", "trainer/check.py", "mtrl_plugins/task_maker/"),
    "model": ("trainer/model.py", "trainer/weight_files.py", "trainer/template/", "trainer/parse/"),
    "engine": ("trainer/engine/torch/", "trainer/engines.py", "trainer/rollout/"),
    "sglang": ("trainer/engine/sglang/",),
    "memory": ("trainer/policy/memory_plan.py", "trainer/policy/memory_parts.py", "mtrl_plugins/plan/"),
    "rewards": ("trainer/reward/",),
    "training": (
        "trainer/algorithms/",
        "trainer/policy/",
        "trainer/distributed/",
        "trainer/train/train_loop.py",
        "trainer/train/job.py",
    ),
    "run-folder": ("trainer/storage/", "trainer/train/", "trainer/cli/", "trainer/collect_rollouts.py"),
    "cluster": ("mtrl_plugins/cluster/",),
    "workers": ("mtrl_plugins/workers/",),
    "pages": ("mtrl_plugins/web/", "trainer/view/"),
    "verl": ("mtrl_plugins/verl/", "mtrl_plugins/verl/", "mtrl_plugins/scripts/"),
    "swift": ("mtrl_plugins/swift/", "mtrl_plugins/swift/"),
    "trl": ("mtrl_plugins/trl/api.py", "mtrl_plugins/trl/"),
    "environments": ("mtrl_plugins/environments/", "mtrl_plugins/verifiers/"),
    "agents": ("mtrl_plugins/agents/", "mtrl_plugins/agents/serve_policy.py"),
}
"""Parts of the page, and the modules whose errors stand there: the longest path that fits counts."""


def group_of(module: str) -> str:
    """The part of the page for a module's errors."""
    fitting = [
        (len(path), group) for group, paths in GROUPS.items() for path in paths if module.startswith(path)
    ]  # fmt: skip
    assert fitting, f"{module} reports errors: name it in GROUPS of tests/docs/message_pages.py"
    return max(fitting)[1]


def errors_by_group() -> dict[str, list[Message]]:
    """Every error, each text once in its group."""
    groups: dict[str, dict[str, Message]] = {group: {} for group in GROUPS}
    for item in messages():
        groups[group_of(item.module)].setdefault(item.text, item)
    return {group: list(known.values()) for group, known in groups.items()}


def render_errors(errors: Sequence[Message]) -> str:
    """A list of errors with their remedies."""
    return "\n".join(
        f"- {_escape(item.text)}" + (f"<br>*remedy:* {_escape(item.remedy)}" if item.remedy else "") for item in errors
    )


def render_alarm(alarm: Callable[..., object]) -> str:
    """What an alarm says, with its likely cause and its remedy."""
    lines: list[str] = []
    for seen, likely, remedy in dict.fromkeys(_alarm_texts(alarm)):
        lines += [f"> {_escape(seen)}<br>", f"> likely: {_escape(likely)}<br>", f"> remedy: {_escape(remedy)}", ""]
    assert lines, f"{alarm.__name__} says nothing"
    return "\n".join(lines[:-1])


def _alarm_texts(alarm: Callable[..., object]) -> Iterator[tuple[str, str, str]]:
    """By the calls of an alarm that take three texts; a name stands for all texts that it is given."""
    tree = ast.parse(dedent(inspect.getsource(alarm)))
    names: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts = texts_of(node.value, {})
            if texts != [HOLE]:
                names.setdefault(node.targets[0].id, []).extend(texts)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 3]
    for call in sorted(calls, key=lambda node: node.lineno):
        texts = [[_flatten(text) for text in dict.fromkeys(texts_of(value, names))] for value in call.args]
        if all(" " in text for item in texts for text in item):
            count = max(map(len, texts))
            seen, likely, remedy = (item * count if len(item) == 1 else item for item in texts)
            yield from zip(seen, likely, remedy, strict=True)


def _flatten(text: str) -> str:
    return re.sub(rf"{HOLE}(?:\s*{HOLE})+", HOLE, " ".join(text.split()))


def _escape(text: str) -> str:
    """As Markdown shows it, except for what stands between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    marks = re.compile(r"(<|\*|(?<!\w)_|_(?!\w))")
    return "".join(part if part.startswith("`") else marks.sub(r"\\\1", part) for part in parts)


def updated_pages() -> Iterator[tuple[Path, str]]:
    """Both pages with their marked parts as they should be."""
    errors = {f"errors {group}": render_errors(found) for group, found in errors_by_group().items() if found}
    yield TROUBLESHOOTING, _filled(TROUBLESHOOTING, errors)
    yield WATCHING, _filled(WATCHING, {f"alarm {item.__name__}": render_alarm(item) for item in alarms.ALARMS})


def _filled(page: Path, parts: Mapping[str, str]) -> str:
    text = page.read_text(encoding="utf-8")
    marks = re.findall(r"<!-- ((?:errors|alarm) [\w-]+) -->", text)
    assert sorted(marks) == sorted(parts), f"{page} has places for {sorted(marks)}, and there are {sorted(parts)}"
    for mark, part in parts.items():
        place = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        text, count = place.subn(lambda found, part=part: f"{found[1]}\n{part}\n\n{found[2]}", text)  # type: ignore[misc]
        assert count == 1, f"{page} has no end of {mark}"
    return text


if __name__ == "__main__":
    for file, updated in updated_pages():
        file.write_text(updated, encoding="utf-8")
