"""Worker process that compares answers by `math_verify`: each request is `[text, solution]`, its answer a reward.

A process, because computing what a policy wrote can take forever within one C function (`9^{9^{9^9}}`), and because
`math_verify`'s own deadlines need the main thread.
"""

from __future__ import annotations

import json
import re
import resource
from importlib import import_module
from typing import Any

from gateway.process.child_entry import Wire

MAX_CPU_S = 20
"""CPU seconds for one comparison, so that the process ends even if nobody is left to end it."""
MAX_MEMORY_BYTES = 4 << 30
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compare(text: str, solution: str) -> float:
    """ms-swift 4's rule: 1 if the text's answer equals the solution; 0 if either cannot be read.

    An answer in `<answer>` tags may be any expression; without tags only LaTeX counts, a box first.
    """
    rules = import_module("math_verify")
    parse = rules.parse
    truth_tag, answer_tag = _ANSWER.search(solution), _ANSWER.search(text)
    truth = parse(truth_tag[1].strip() if truth_tag else solution, extraction_mode="first_match")
    if not truth:
        return 0.0
    options: dict[str, Any] = {}
    if not answer_tag:
        normalization = import_module("latex2sympy2_extended").NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, boxed=True, units=True
        )
        latex = rules.LatexExtractionConfig(
            normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
        )
        options["extraction_config"] = [latex]
    answer = parse(answer_tag[1].strip() if answer_tag else text, extraction_mode="first_match", **options)
    try:
        return float(rules.verify(truth, answer))
    except Exception:  # boundary: ms-swift scores whatever cannot be compared as wrong
        return 0.0


def limit_resources() -> None:
    """Allows the next comparison its CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + MAX_CPU_S, hard))


def serve() -> None:
    """Answers until the other side is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    wire = Wire.claim()
    while (message := wire.receive()) is not None:
        limit_resources()
        wire.send_value(message[0], compare(*json.loads(message[1])))
