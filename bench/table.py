"""The gateway benchmark's table: medians with their quartiles, ratios to the peers, and whether promises are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from rounds import Measurement, Sample
from scale import Scale

BUSY_CLIENT_SHARE = 0.7
"""A load generator that takes more of a core than this may itself be the bottleneck."""
MAX_IDLE_KIB = 10.0
MAX_P99_MS_A_CONNECTION = 2.0
"""A call may wait for one of every other connection, of 0.3 ms each on a quiet machine."""


def compute_figures(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Each row's medians, its cost as a multiple of its floor, and its peer's as a multiple of its own."""
    by_key = {item.row.key: item for item in measurements}
    rows = []
    for item in measurements:
        peer = (item.row.peer,) if item.row.peer else ()
        ratios = {
            "of_floor": _ratios(item, by_key, item.row.floor),
            "peer_over": _ratios(item, by_key, peer, over=True),
        }
        rows.append(_row_figures(item) | ratios)
    return rows


def _row_figures(item: Measurement) -> dict[str, Any]:
    row = item.row
    figures = {"key": row.key, "title": row.title, "behind": row.behind, "floor": row.floor, "peer": row.peer}
    figures |= {"problem": item.problem, "at": {}}
    if not item.problem:
        figures["at"] = {str(concurrency): _medians(samples) for concurrency, samples in item.samples.items()}
    return figures


def _medians(samples: Sequence[Sample]) -> dict[str, Any]:
    low, middle, high = _quartiles([1000 * sample.cpu_s / sample.calls for sample in samples])
    return {
        "calls": sum(sample.calls for sample in samples),
        "right": sum(sample.right for sample in samples),
        "cpu_ms": middle,
        "cpu_ms_low": low,
        "cpu_ms_high": high,
        "calls_per_s": median(sample.calls / sample.wall_s for sample in samples),
        "tool_cpu_ms": median(1000 * sample.tool_cpu_s / sample.calls for sample in samples),
        "client_bound": median(sample.client_share for sample in samples) > BUSY_CLIENT_SHARE,
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    """The quartiles, the median in the middle; of a single value, that value."""
    return quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3


def _ratios(
    item: Measurement, by_key: Mapping[str, Measurement], others: Sequence[str], *, over: bool = False
) -> dict[str, dict[str, float]]:
    """A row's CPU per call divided by that of others together (or the inverse: `over`), by concurrency.

    Both are of the same round, so that a busy machine makes both dearer; then the median of the rounds.
    """
    measured = [by_key[key] for key in others if key in by_key]
    if not others or len(measured) < len(others) or any(each.problem for each in (item, *measured)):
        return {}
    ratios = {}
    for concurrency, samples in item.samples.items():
        ours = [sample.cpu_s / sample.calls for sample in samples]
        theirs = map(sum, zip(*(_cpu_of(each, concurrency) for each in measured), strict=True))
        pairs = [(high, low) if over else (low, high) for low, high in zip(ours, theirs, strict=True)]
        values = [first / second for first, second in pairs if second]
        if values:
            low, middle, high = _quartiles(values)
            ratios[str(concurrency)] = {"median": middle, "low": low, "high": high}
    return ratios


def _cpu_of(item: Measurement, concurrency: int) -> list[float]:
    return [sample.cpu_s / sample.calls for sample in item.samples[concurrency]]


def format_promises(
    measurements: Sequence[Measurement], rows: Sequence[Mapping[str, Any]], scale: Scale | None
) -> list[str]:
    """A line for each promise; the higher concurrency decides."""
    lines = []
    for item, figures in zip(measurements, rows, strict=True):
        row, name = item.row, f"{item.row.title} ({item.row.behind})"
        if row.at_most is not None and (times := _highest(figures["of_floor"])):
            text = f"{name}: at most {row.at_most:g}x of {' + '.join(row.floor)}"
            lines.append(_format_promise(text, f"{times:.2f}x", times <= row.at_most))
        if row.beats_peer is not None and (times := _highest(figures["peer_over"])):
            text = f"{name}: {row.peer} costs at least {row.beats_peer:g}x as much"
            lines.append(_format_promise(text, f"{times:.2f}x", times >= row.beats_peer))
    return lines + ([] if scale is None else _scale_promises(scale))


def _highest(ratios: Mapping[str, Mapping[str, float]]) -> float | None:
    """The ratio at the highest concurrency."""
    return ratios[max(ratios, key=int)]["median"] if ratios else None


def _scale_promises(scale: Scale) -> list[str]:
    lines = [
        _format_promise(
            f"{wave.calls} calls of {scale.sessions} sessions at once, none lost or doubled ({wave.tool})",
            f"{wave.answered} right, {wave.lost} lost, {wave.duplicated} doubled",
            wave.answered == wave.calls and not wave.lost and not wave.duplicated,
        )
        for wave in scale.waves
    ]
    is_kept = scale.idle_kib <= MAX_IDLE_KIB
    text = f"at most {MAX_IDLE_KIB:g} KiB for an idle session"
    lines.append(_format_promise(text, f"{scale.idle_kib:.1f} KiB", is_kept))
    for latency in scale.latencies:
        limit_ms = MAX_P99_MS_A_CONNECTION * max(latency.connections, 10)
        text = f"{latency.connections} connections beside {scale.waiting:,} sessions: a p99 of at most {limit_ms:g} ms"
        lines.append(_format_promise(text, f"{latency.p99_ms:.1f} ms", latency.p99_ms <= limit_ms))
    return lines


def _format_promise(text: str, value: str, is_kept: bool) -> str:
    return f"| {text} | {value} | {'met' if is_kept else '**missed**'} |"


HEAD = (
    "row | path | tool | CPU ms, one at a time | calls/s | CPU ms, {many} at once | calls/s "
    "| tool's CPU ms | of its floor | floor | FastMCP's cost"
)

LEGEND = (
    "CPU is that of the measured process alone; the tool server's has a column of its own. Ratios compare CPU with "
    "{many} calls at once in the same round, and are medians of the rounds, with quartiles: this row's cost as a "
    "multiple of its floor, which is the row or the sum of the rows named beside it, and the cost of FastMCP, with the "
    "same way in and the same tool behind, as a multiple of this row's. FastMCP has one client connected all the time, "
    "answers with JSON, keeps no sessions, and runs on uvloop and httptools, as all rows over HTTP do. The tool server "
    "over stdio is of the standard library alone: one of the SDK takes more CPU for a call than our gateway, which "
    "then waits for each answer, while a gateway that takes more than the server reads many at once."
)


def format_table(
    rows: Sequence[Mapping[str, Any]], promises: Sequence[str], scale: Scale | None, about: Sequence[str]
) -> str:
    """The results as Markdown."""
    concurrencies = sorted({int(n) for row in rows for n in row["at"]})
    few, many = (str(n) for n in (concurrencies or [1, 64]))
    lines = [*about, "", f"| {HEAD.format(many=many)} |", "|---|---|---|" + "--:|" * 6 + "---|--:|"]
    lines += [_format_row(row, few, many) for row in rows]
    lines += ["", LEGEND.format(many=many), "", "| promise | measured | |", "|---|--:|---|", *promises]
    if scale is not None:
        lines += ["", *_format_scale(scale)]
    return "\n".join(lines) + "\n"


def _format_row(row: Mapping[str, Any], few: str, many: str) -> str:
    if row["problem"]:
        return f"| {row['key']} | {row['title']} | {row['behind']} | not measured: {row['problem']} |" + " |" * 7
    low, high = row["at"][few], row["at"][many]
    wrong = sum(at["calls"] - at["right"] for at in row["at"].values())
    title = row["title"] + (f" (**{wrong} wrong answers**)" if wrong else "")
    cells = [
        row["key"],
        title,
        row["behind"],
        _format_cpu(low),
        _format_rate(low),
        _format_cpu(high),
        _format_rate(high),
    ]
    cells += [
        f"{high['tool_cpu_ms']:.2f}",
        _format_ratio(row["of_floor"], many),
        " + ".join(row["floor"]),
        _format_ratio(row["peer_over"], many),
    ]
    return f"| {' | '.join(cells)} |"


def _format_cpu(at: Mapping[str, Any]) -> str:
    digits = 3 if at["cpu_ms"] < 1 else 2
    return f"{at['cpu_ms']:.{digits}f} ({at['cpu_ms_low']:.{digits}f}-{at['cpu_ms_high']:.{digits}f})"


def _format_rate(at: Mapping[str, Any]) -> str:
    return f"{at['calls_per_s']:,.0f}{' (client bound)' if at['client_bound'] else ''}"


def _format_ratio(ratios: Mapping[str, Mapping[str, float]], concurrency: str) -> str:
    if (ratio := ratios.get(concurrency)) is None:
        return ""
    return f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _format_scale(scale: Scale) -> list[str]:
    lines = [
        f"{scale.sessions} sessions on one process: {scale.open_ms:.2f} ms to open one and {scale.close_ms:.2f} ms "
        f"to close it, one after another; {scale.idle_kib:.1f} KiB each while idle; {scale.peak_mib:.0f} MiB for the "
        f"whole process after the waves; {scale.left_open} left open at the end."
    ]
    lines += [
        f"{wave.calls} calls under way at the same moment through `{wave.tool}`: all answered within "
        f"{wave.wall_s:.1f} s, {wave.cpu_ms:.2f} ms CPU a call."
        for wave in scale.waves
    ]
    lines += ["", "| sessions that wait | connections | calls | median ms | p99 ms | most ms |"]
    lines.append("|--:|--:|--:|--:|--:|--:|")
    lines += [
        f"| {scale.waiting:,} | {each.connections} | {each.calls:,} | {each.median_ms:.1f} | {each.p99_ms:.1f} "
        f"| {each.most_ms:.1f} |"
        for each in scale.latencies
    ]
    return lines
