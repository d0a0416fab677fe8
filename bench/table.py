"""Numbers as a person reads them: medians with their spread, what they are beside the peers, and what was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rounds import Measurement, Sample
from scale import Scale

BUSY = 0.7
"""A load that takes more of a core than this may be what holds the rest back."""
IDLE_KIB = 40.0


def figures(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Each row with its medians, and its cost beside its peers' before the same server."""
    told = [_figures(one) for one in found]
    by_key = {row["key"]: row for row in told}
    for row in told:
        for ratio, peer in (("of_raw", f"raw-{row['behind']}"), ("fastmcp_over", f"fastmcp-{row['behind']}")):
            row[ratio] = _ratio(row, by_key.get(peer), over=ratio == "fastmcp_over")
    return told


def _figures(one: Measurement) -> dict[str, Any]:
    row = one.row
    found = {"key": row.key, "title": row.title, "behind": row.behind, "problem": one.problem, "at": {}}
    if not one.problem:
        found["at"] = {str(concurrency): _at(samples) for concurrency, samples in one.samples.items()}
    return found


def _at(samples: Sequence[Sample]) -> dict[str, Any]:
    cpu_ms = [1000 * one.cpu_s / one.calls for one in samples]
    return {
        "calls": sum(one.calls for one in samples),
        "right": sum(one.right for one in samples),
        "cpu_ms": median(cpu_ms),
        "cpu_ms_least": min(cpu_ms),
        "cpu_ms_most": max(cpu_ms),
        "calls_per_s": median(one.calls / one.wall_s for one in samples),
        "tool_cpu_ms": median(1000 * one.behind_s / one.calls for one in samples),
        "client_bound": median(one.client_share for one in samples) > BUSY,
    }


def _ratio(row: Mapping[str, Any], peer: Mapping[str, Any] | None, *, over: bool) -> dict[str, float]:
    if peer is None or peer is row:
        return {}
    pairs = {n: (at["cpu_ms"], peer["at"][n]["cpu_ms"]) for n, at in row["at"].items() if n in peer["at"]}
    return {n: (theirs / ours if over else ours / theirs) for n, (ours, theirs) in pairs.items() if ours and theirs}


def promises(found: Sequence[Measurement], rows: Sequence[Mapping[str, Any]], scaled: Scale | None) -> list[str]:
    """Each promise, and whether it is kept under load; the higher concurrency decides."""
    lines = []
    for one, row in zip(found, rows, strict=True):
        if not row["at"]:
            continue
        most = max(row["at"], key=int)
        name = f"{one.row.title} ({one.row.behind})"
        if one.row.target_ms is not None:
            got = row["at"][most]["cpu_ms"]
            lines.append(
                _promise(f"{name}: at most {one.row.target_ms:g} ms CPU", f"{got:.3f} ms", got <= one.row.target_ms)
            )
        if one.row.beats_fastmcp is not None and (times := row["fastmcp_over"].get(most)):
            text = f"{name}: at least {one.row.beats_fastmcp:g}x less than FastMCP"
            lines.append(_promise(text, f"{times:.1f}x", times >= one.row.beats_fastmcp))
    return lines + ([] if scaled is None else _of_scale(scaled))


def _of_scale(scaled: Scale) -> list[str]:
    lines = [
        _promise(
            f"{wave.calls} calls of {scaled.sessions} sessions at once, none lost or doubled ({wave.tool})",
            f"{wave.answered} right, {wave.lost} lost, {wave.duplicated} doubled",
            wave.answered == wave.calls and not wave.lost and not wave.duplicated,
        )
        for wave in scaled.waves
    ]
    kept = scaled.idle_kib <= IDLE_KIB
    return [*lines, _promise(f"at most {IDLE_KIB:g} KiB for an idle session", f"{scaled.idle_kib:.1f} KiB", kept)]


def _promise(text: str, got: str, kept: bool) -> str:
    return f"| {text} | {got} | {'met' if kept else '**missed**'} |"


HEAD = (
    "path | tool | CPU ms, one at a time | calls/s | CPU ms, {many} at once | calls/s "
    "| tool's CPU ms | of raw client | FastMCP's cost"
)

LEGEND = (
    "CPU is that of the measured process alone; what the tool server takes stands beside it. The last two columns "
    "compare CPU with {many} calls at once: this row's as a multiple of the raw client's before the same server, and "
    "FastMCP's as a multiple of this row's."
)


def markdown(rows: Sequence[Mapping[str, Any]], kept: Sequence[str], scaled: Scale | None, about: Sequence[str]) -> str:
    concurrencies = sorted({int(n) for row in rows for n in row["at"]})
    few, many = (str(n) for n in (concurrencies or [1, 64]))
    lines = [*about, "", f"| {HEAD.format(many=many)} |", "|---|---|" + "--:|" * 7]
    lines += [_line(row, few, many) for row in rows]
    lines += ["", LEGEND.format(many=many), "", "| promise | measured | |", "|---|--:|---|", *kept]
    if scaled is not None:
        lines += ["", *_scaled(scaled)]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any], few: str, many: str) -> str:
    if row["problem"]:
        return f"| {row['title']} | {row['behind']} | not measured: {row['problem']} |" + " |" * 6
    one, all_ = row["at"][few], row["at"][many]
    wrong = sum(at["calls"] - at["right"] for at in row["at"].values())
    title = row["title"] + (f" (**{wrong} wrong answers**)" if wrong else "")
    cells = [title, row["behind"], _cpu(one), _speed(one), _cpu(all_), _speed(all_), f"{all_['tool_cpu_ms']:.2f}"]
    cells += [_times(row["of_raw"], many), _times(row["fastmcp_over"], many)]
    return f"| {' | '.join(cells)} |"


def _cpu(at: Mapping[str, Any]) -> str:
    digits = 3 if at["cpu_ms"] < 1 else 2
    return f"{at['cpu_ms']:.{digits}f} ({at['cpu_ms_least']:.{digits}f}-{at['cpu_ms_most']:.{digits}f})"


def _speed(at: Mapping[str, Any]) -> str:
    return f"{at['calls_per_s']:,.0f}{' (client bound)' if at['client_bound'] else ''}"


def _times(ratio: Mapping[str, float], many: str) -> str:
    return f"{ratio[many]:.2f}x" if many in ratio else ""


def _scaled(scaled: Scale) -> list[str]:
    lines = [
        f"{scaled.sessions} sessions on one process: {scaled.open_ms:.2f} ms to open one and {scaled.close_ms:.2f} ms "
        f"to close it, one after another; {scaled.idle_kib:.1f} KiB each while idle; {scaled.peak_mib:.0f} MiB for the "
        f"whole process after the waves; {scaled.left_open} left open at the end."
    ]
    lines += [
        f"{wave.calls} calls under way at the same moment through `{wave.tool}`: all answered within "
        f"{wave.wall_s:.1f} s, {wave.cpu_ms:.2f} ms CPU a call."
        for wave in scaled.waves
    ]
    return lines
