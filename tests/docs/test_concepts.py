"""Every block of docs/concepts.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow
from trainer.rollout.rollout import StopReason


def test_concepts_page(follow: Follow) -> None:
    done = follow("docs/concepts.md")
    assert "; 0 differ" in done["replay"]


def test_there_are_as_many_stop_reasons_as_the_page_says() -> None:
    assert len(StopReason) == 18 and sum(reason.is_infrastructure for reason in StopReason) == 8
