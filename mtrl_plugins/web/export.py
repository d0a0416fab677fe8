"""Exports the web UI with the data of runs as one self-contained HTML file.

The JavaScript modules are bundled into one script, data are JSON without `<`, and a content security policy allows only
that script to run.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from gateway.disk_errors import write_atomically
from gateway.errors import ConfigError
from gateway.web.static_files import SHARED_PACKAGE, StaticFile, find_file
from gateway.wire import dumps
from mtrl_plugins.web.runs import NotFound, ViewedRun
from mtrl_plugins.web.search import parse_query
from trainer.storage.rollout_file import RunError

ENTRY = "app.js"
PACKAGE = "mtrl_plugins.web"
MAX_ROWS = 20_000
"""Rows of the table in the file, the newest, to limit the file's size."""
MAX_ROLLOUT_BYTES = 12_000_000
"""The size of all rollouts that are included token by token, with their media."""
IMPORT = re.compile(r'^import \{ (.+?) \} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) ([\w$]+))", re.MULTILINE)


def export_runs(runs: Sequence[ViewedRun], file: Path, chosen: Sequence[int] = ()) -> str:
    """Writes the file, and returns a summary. The `chosen` rollouts are included token by token, by default as many
    as fit."""
    summaries: list[str] = []
    run_data = {}
    for run in runs:
        while run.update_index():
            pass
        run_data[run.name], summary = _collect_run(run, MAX_ROLLOUT_BYTES // len(runs), chosen)
        summaries.append(f"{run.name}: {summary}")
    data = {"about": {"runs": [run.to_dict() for run in runs]}, "runs": run_data}
    page = _build_page(dumps(data).decode().replace("<", "\\u003c"))
    try:
        write_atomically(file, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})\n  remedy: name another file") from error
    return "; ".join(summaries)


def _collect_run(run: ViewedRun, remaining_bytes: int, chosen: Sequence[int]) -> tuple[dict[str, Any], str]:
    count = run.index.count
    rows: list[dict[str, Any]] = []
    while len(rows) < min(MAX_ROWS, count):
        more = run.rollouts(parse_query({"sort": "-place", "limit": "500", "offset": str(len(rows))}))["rows"]
        if not more:
            break
        rows += more
    rows.reverse()
    rollouts: dict[str, Any] = {}
    blobs: dict[str, str] = {}
    broken = 0
    for place in chosen or _rank_rollouts(rows):
        try:
            rollout = run.rollout(place)
            media = {
                part["sha256"]: _data_url(run, part) for part in _find_media(rollout) if part["sha256"] not in blobs
            }
        except (NotFound, RunError) as error:
            if chosen:
                raise _missing_rollout_error(run, place, error) from error
            broken += 1
            continue
        remaining_bytes -= len(dumps(rollout)) + sum(map(len, media.values()))
        if remaining_bytes < 0 and not chosen:
            break
        rollouts[str(place)] = rollout
        blobs |= media
    data = {
        "metrics": run.metrics(0)["lines"],
        "alarms": run.alarms(),
        "choices": run.choices(),
        "steps": run.steps(),
        "tools": run.tools(),
        "rows": rows,
        "rollouts": rollouts,
        "blobs": blobs,
    }
    unreadable = f"; {broken:,} are unreadable" if broken else ""
    return data, f"{len(rows):,} of {count:,} rollouts are listed, {len(rollouts):,} token by token{unreadable}"


def _missing_rollout_error(run: ViewedRun, place: int, error: Exception) -> Exception:
    if isinstance(error, RunError):
        return error
    last = run.index.count - 1
    remedy = f"name one from 0 to {last} with --rollout, or none" if last >= 0 else "wait until the first has ended"
    return ConfigError(str(error), file=run.folder, remedy=remedy)


def _rank_rollouts(rows: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Rollouts in the order in which they are included: the last step, the first step, then steps in between."""
    steps = sorted({row["step"] for row in rows if row["step"] is not None})
    order = dict.fromkeys([*steps[-1:], *steps[:1], *steps[len(steps) // 2 :: 7], *reversed(steps)])
    by_step: dict[int | None, list[int]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row["place"])
    for step in [*order, None]:
        yield from by_step.get(step, ())


def _find_media(rollout: dict[str, Any]) -> Iterable[dict[str, Any]]:
    entries = (entry for ledger in rollout["ledgers"] for entry in ledger["entries"])
    return (part for entry in entries for part in entry.get("parts", ()) if "sha256" in part)


def _data_url(run: ViewedRun, part: dict[str, Any]) -> str:
    return f"data:{part['mime']};base64,{base64.b64encode(run.blob(part['sha256'])).decode()}"


def _build_page(data: str) -> str:
    style = _read_text("theme.css") + _read_text("page.css")
    script = bundle_modules(ENTRY)
    policy = (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; img-src data:; "
        "media-src data:; base-uri 'none'; form-action 'none'"
    )
    mark = base64.b64encode(_read_file("icon.svg").body).decode()
    head = _read_text("index.html")
    head = re.sub(r'<link rel="(?:stylesheet|modulepreload)"[^>]*>\n', "", head)
    head = re.sub(r'<script type="module"[^>]*></script>\n', "", head)
    head = head.replace('href="icon.svg"', f'href="data:image/svg+xml;base64,{mark}"')
    meta = f'<meta http-equiv="content-security-policy" content="{policy}">\n'
    head = head.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{meta}')
    head = head.replace("</head>", f"<style>{style}</style>\n</head>")
    tail = (
        f'<script type="application/json" id="kept">{data}</script>\n<script type="module">{script}</script>\n</body>'
    )
    return head.replace("</body>", tail)


def bundle_modules(entry: str) -> str:
    """A module and its imports as one script, each in a scope of its own."""
    modules: dict[str, str] = {}
    _bundle_module(entry, modules)
    body = modules.pop(entry)
    scopes = [f"const {_module_name(name)} = (() => {{\n{text}\n}})();" for name, text in modules.items()]
    script = "\n".join([*scopes, body])
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("the script has text that ends a script element")
    return script


def _bundle_module(name: str, modules: dict[str, str]) -> None:
    text = _read_text(name)
    for imported in IMPORT.findall(text):
        if imported[1] not in modules:
            _bundle_module(imported[1], modules)
    exported = EXPORT.findall(text)
    text = IMPORT.sub(lambda match: f"const {{ {match[1].replace(' as ', ': ')} }} = {_module_name(match[2])};", text)
    text = EXPORT.sub("", text)
    modules[name] = f"{text}\nreturn {{ {', '.join(exported)} }};" if exported else text


def _module_name(file: str) -> str:
    return f"of_{file.removesuffix('.js')}"


def _read_text(name: str) -> str:
    return _read_file(name).body.decode()


def _read_file(name: str) -> StaticFile:
    static_file = find_file(name, PACKAGE, SHARED_PACKAGE)
    if static_file is None:
        raise FileNotFoundError(name)
    return static_file


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
