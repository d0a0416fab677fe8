"""The trainer runs on asyncio: torch and its peers know no other loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are several times slower when threads share them."""
    import torch  # only where a test asks for it: most do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
