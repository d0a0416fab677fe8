"""What the tests of ranks share: a tiny model, and one thread for torch, as ranks have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.policy.tiny_policies import tiny_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is tied."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(tie_word_embeddings=True).save_pretrained(folder)
    return folder
