"""One file that holds a page and what it shows: it is opened from anywhere, asks nobody for anything, and runs no text.

Modules are joined into one script, data stand as JSON in which no `<` is left, and a policy in the file's own head
lets nothing run but that script.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError
from gateway.page.files import SHARED, Piece, piece
from gateway.wire import dumps
from trainer.page.query import query
from trainer.page.runs import Missing, Run
from trainer.run.blobs import write_whole
from trainer.run.file import RunError

ENTRY = "app.js"
HERE = "trainer.page"
ROWS = 20_000
"""Of the table, the newest; more make a file that nobody can send."""
WHOLE_BYTES = 12_000_000
"""Of rollouts that are held token by token, their pictures included."""
IMPORT = re.compile(r'^import \{ (.+?) \} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) ([\w$]+))", re.MULTILINE)


def export(runs: Sequence[Run], file: Path, chosen: Sequence[int] = ()) -> str:
    """What is in the file, in words. `chosen` rollouts are held whole; by default as many as there is room for."""
    told: list[str] = []
    held = {}
    for run in runs:
        while run.grow():
            pass
        held[run.name], said = _held(run, WHOLE_BYTES // len(runs), chosen)
        told.append(f"{run.name}: {said}")
    data = {"about": {"runs": [run.told() for run in runs]}, "runs": held}
    page = _page(dumps(data).decode().replace("<", "\\u003c"))
    try:
        write_whole(file, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})\n  remedy: name another file") from error
    return "; ".join(told)


def _held(run: Run, room: int, chosen: Sequence[int]) -> tuple[dict[str, Any], str]:
    known = run.index.known
    rows: list[dict[str, Any]] = []
    while len(rows) < min(ROWS, known):
        more = run.rollouts(query({"sort": "-place", "limit": "500", "offset": str(len(rows))}))["rows"]
        if not more:
            break
        rows += more
    rows.reverse()
    whole: dict[str, Any] = {}
    blobs: dict[str, str] = {}
    broken = 0
    for place in chosen or _worth_it(rows):
        try:
            one = run.rollout(place)
            media = {part["sha256"]: _url(run, part) for part in _media(one) if part["sha256"] not in blobs}
        except (Missing, RunError) as error:
            if chosen:
                raise _asked_for(run, place, error) from error
            broken += 1
            continue
        room -= len(dumps(one)) + sum(map(len, media.values()))
        if room < 0 and not chosen:
            break
        whole[str(place)] = one
        blobs |= media
    data = {
        "metrics": run.metrics(0)["lines"],
        "alarms": run.alarms(),
        "choices": run.choices(),
        "rows": rows,
        "rollouts": whole,
        "blobs": blobs,
    }
    left_out = f"; {broken:,} that cannot be read are not" if broken else ""
    return data, f"{len(rows):,} of {known:,} rollouts are listed, {len(whole):,} are there token by token{left_out}"


def _asked_for(run: Run, place: int, error: Exception) -> Exception:
    if isinstance(error, RunError):
        return error
    last = run.index.known - 1
    remedy = f"name one from 0 to {last} with --rollout, or none" if last >= 0 else "wait for the first to be over"
    return ConfigError(str(error), file=run.folder, remedy=remedy)


def _worth_it(rows: Sequence[dict[str, Any]]) -> Iterator[int]:
    """The last step's first, then the first's, then those between, so that how it went can be read."""
    steps = sorted({row["step"] for row in rows if row["step"] is not None})
    order = dict.fromkeys([*steps[-1:], *steps[:1], *steps[len(steps) // 2 :: 7], *reversed(steps)])
    by_step: dict[int | None, list[int]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row["place"])
    for step in [*order, None]:
        yield from by_step.get(step, ())


def _media(one: dict[str, Any]) -> Iterable[dict[str, Any]]:
    entries = (entry for ledger in one["ledgers"] for entry in ledger["entries"])
    return (part for entry in entries for part in entry.get("parts", ()) if "sha256" in part)


def _url(run: Run, part: dict[str, Any]) -> str:
    return f"data:{part['mime']};base64,{base64.b64encode(run.blob(part['sha256'])).decode()}"


def _page(data: str) -> str:
    style = _text("look.css") + _text("page.css")
    script = joined(ENTRY)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    mark = base64.b64encode(_piece("mark.svg").body).decode()
    head = _text("index.html")
    head = re.sub(r'<link rel="(?:stylesheet|modulepreload)"[^>]*>\n', "", head)
    head = re.sub(r'<script type="module"[^>]*></script>\n', "", head)
    head = head.replace('href="mark.svg"', f'href="data:image/svg+xml;base64,{mark}"')
    meta = f'<meta http-equiv="content-security-policy" content="{policy}">\n'
    head = head.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{meta}')
    head = head.replace("</head>", f"<style>{style}</style>\n</head>")
    tail = (
        f'<script type="application/json" id="kept">{data}</script>\n<script type="module">{script}</script>\n</body>'
    )
    return head.replace("</body>", tail)


def joined(entry: str) -> str:
    """A module and all that it imports as one script; each keeps its own names."""
    made: dict[str, str] = {}
    _join(entry, made)
    body = made.pop(entry)
    inner = [f"const {_name(name)} = (() => {{\n{text}\n}})();" for name, text in made.items()]
    script = "\n".join([*inner, body])
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("the page's own script would end itself")
    return script


def _join(name: str, made: dict[str, str]) -> None:
    text = _text(name)
    for imported in IMPORT.findall(text):
        if imported[1] not in made:
            _join(imported[1], made)
    exported = EXPORT.findall(text)
    text = IMPORT.sub(lambda found: f"const {{ {found[1].replace(' as ', ': ')} }} = {_name(found[2])};", text)
    text = EXPORT.sub("", text)
    made[name] = f"{text}\nreturn {{ {', '.join(exported)} }};" if exported else text


def _name(file: str) -> str:
    return f"of_{file.removesuffix('.js')}"


def _text(name: str) -> str:
    return _piece(name).body.decode()


def _piece(name: str) -> Piece:
    found = piece(name, HERE, SHARED)
    if found is None:
        raise FileNotFoundError(name)
    return found


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
