"""Parts of a fake server's answers: version spans, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


def answer_spans(versions: Sequence[str]) -> list[dict[str, object]]:
    """Of ids in a row, as they are told: the first of each run, and the one after its last."""
    spans: list[dict[str, object]] = []
    for place, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": place})
        spans[-1]["end"] = place + 1
    return spans


def answer_events(answer: Any, new_only: bool, breaks_off: bool) -> Iterator[str]:
    """The events of a streamed answer."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    for end in range(1, len(ids) + 1):
        if breaks_off and end > 1:
            raise ConnectionError("the server is lost")
        start = end - 1 if new_only else 0
        pairs = meta["output_token_logprobs"][start:end]
        so_far = {**meta, "output_token_logprobs": pairs, "completion_tokens": end}
        event = {"text": "", "output_ids": ids[start:end], "meta_info": so_far}
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"
