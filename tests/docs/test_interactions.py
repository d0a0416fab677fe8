"""Every block of docs/interactions.md does what it says."""

from __future__ import annotations

import re

from tests.docs.conftest import Follow


def test_interactions_page(follow: Follow) -> None:
    listed = follow("docs/interactions.md", no_servers=True)["mtrl-gateway list"]
    wanted = ("gsm8k", "lenient", "polite", "judge", "caller", "traveller", "code")
    assert {*re.findall(r"feedback_\w+", listed)} == {f"feedback_{name}" for name in wanted}
