"""Where a GPU has one attention kernel for each length, none is too many for torch, and none is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.tiny_policies import policy_logprobs, tiny_model
from trainer.policy import flex_forest
from trainer.policy.flex_forest import SHORTEST, PreOrder, ladder_length
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # that torch looks at, and hides from others
LENGTHS = [SHORTEST << power for power in range(5)]
"""The ladder to 16,384, of which a micro-batch of 8,192 tokens has the first four."""
WIDTH = 16


class Backend:
    """Counts the graphs that torch compiles, and runs them, or only returns what has their results' shapes."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.computes = False

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        if self.computes:
            return graph.forward
        (output,) = graph.graph.find_nodes(op="output")
        shapes = [node.meta["example_value"].shape for node in output.args[0]]
        return lambda *_: tuple(torch.zeros(shape) for shape in shapes)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Compiles on this CPU what a GPU would."""
    backend, kernel = Backend(), flex_forest._kernel
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(flex_forest, "_kernel", lambda _, *key: kernel("cuda", *key))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # Refuses gradients.
    kernel.cache_clear()
    yield backend
    kernel.cache_clear()
    torch._dynamo.reset()


def attend(length: int, window: int | None, *, roots: int = 1) -> None:
    """Attention over rows that share nothing, in a forest of a length of the ladder."""
    assert ladder_length(length) == length
    place_L = torch.arange(length)
    end_L = (place_L // (length // roots) + 1) * (length // roots)
    order = PreOrder(place_L, place_L, end_L, place_L)
    inputs = [torch.zeros(length, heads * WIDTH, requires_grad=True) for heads in (2, 1, 1)]
    assert order.attend(inputs, (2, 1, 1), None, window).shape == (length, 2 * WIDTH)


def test_each_length_of_each_mode_is_compiled_once_and_all_of_them_are(backend: Backend) -> None:
    modes = list(product((None, 512), (torch.no_grad, torch.enable_grad)))
    for window, mode in modes:
        before = len(backend.graphs)
        for length in LENGTHS:
            with mode():
                attend(length, window)
                attend(length, window, roots=2)
            assert len(backend.graphs) - before == LENGTHS.index(length) + 1
    assert len(backend.graphs) == len(modes) * len(LENGTHS), "20 kernels, of which torch keeps 8 of one function"
    assert all("flex_attention" in graph.code for graph in backend.graphs)


def test_a_model_attends_by_the_compiled_kernel_which_its_layers_share(backend: Backend) -> None:
    policy, rows = Policy(tiny_model("qwen3"), UpdateSettings()), [[5, 6, 7, 8], [5, 6, 9], [4] * 7]
    with torch.no_grad():
        blocks = policy_logprobs(policy, rows)
        policy.logprob_reader.one_kernel, backend.computes = True, True
        assert torch.allclose(policy_logprobs(policy, rows), blocks, atol=1e-5)
    assert len(backend.graphs) == 1


def test_what_is_no_single_kernel_fails_and_is_not_run_without_one(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend_in_parts(*placed: Tensor, **_: Any) -> Tensor:
        torch._dynamo.graph_break()
        return placed[0]

    monkeypatch.setattr(flex_forest, "flex_attention", attend_in_parts)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        attend(SHORTEST, None)
    assert not backend.graphs
