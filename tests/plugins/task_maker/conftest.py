"""Fixtures of the tests of `make-tasks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.task_maker.chat_server import serve_chat


@pytest.fixture
def chat_url() -> Iterator[str]:
    """The URL of a chat endpoint; ChatHandler.reply gives its replies."""
    with serve_chat() as url:
        yield url
