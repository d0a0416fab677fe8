"""The torch engine writes what the model would, whoever else is in the batch and whatever it already knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM

from tests.trainer import tiny
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.torch import TorchEngine
from trainer.engine.torch.dense import Dense
from trainer.engine.torch.forward import Piece
from trainer.engine.torch.slab import Slab

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = Sampling(max_tokens=24, temperature=0)
OURS = ["qwen3", "qwen2", "llama", "biased"]


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    with anyio.fail_after(60):
        async with TorchEngine(tiny.model()) as engine:
            yield engine


@pytest.mark.parametrize("family", [*OURS, "mistral"])
async def test_greedy_is_what_generate_writes(family: str) -> None:
    model = tiny.model(family)
    async with TorchEngine(model) as engine:
        for length in (1, 7, 290):
            asked = tiny.prompt(length)
            written = await engine.generate(asked, GREEDY)
            assert written.ids == tiny.greedy(model, asked, 24)
            assert written.stop == "length"


@pytest.mark.parametrize("family", [*OURS, "mistral"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_logprobs_are_those_of_a_forward_over_all_of_it(family: str, temperature: float) -> None:
    model = tiny.model(family)
    sampling = Sampling(max_tokens=40, temperature=temperature, top_k=20, seed=3)
    async with TorchEngine(model) as engine:
        asked = tiny.prompt(30)
        first = await engine.generate(asked, sampling)
        more = [*asked, *first.ids, *tiny.prompt(9, seed=2)]
        second = await engine.generate(more, sampling)
    assert second.cached == len(asked) + len(first.ids) - 1
    for ids, written in ((asked, first), (more, second)):
        expected = tiny.logprobs(model, ids, written.ids, temperature)
        assert max(abs(a - b) for a, b in zip(expected, written.logprobs, strict=True)) < 1e-4


def test_what_is_not_ours_says_how_it_runs() -> None:
    assert TorchEngine(tiny.model()).capabilities.notes == ()
    assert TorchEngine(tiny.model()).capabilities.context == tiny.CONTEXT
    assert "its own module" in TorchEngine(tiny.model("mistral")).capabilities.notes[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "its rope is dynamic"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "not all of its layers attend"),
    ],
)
async def test_a_change_that_our_arithmetic_does_not_know_goes_to_the_module(changes: Any, says: str) -> None:
    model = tiny.changed(**changes)
    async with TorchEngine(model) as engine:
        assert says in engine.capabilities.notes[0]
        written = await engine.generate(tiny.prompt(30), GREEDY)
    assert written.ids == tiny.greedy(model, tiny.prompt(30), 24)


def test_a_model_without_keys_and_values_is_refused() -> None:
    config = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(EngineError, match="cannot run a model of type mamba"):
        TorchEngine(MambaForCausalLM(config))


def test_half_the_precision_is_not_called_exact() -> None:
    assert TorchEngine(tiny.model()).capabilities.exact
    assert not TorchEngine(tiny.changed().to(torch.bfloat16)).capabilities.exact


async def test_a_turn_finds_all_of_the_turns_before_it(engine: TorchEngine) -> None:
    ids, possible, cached = tiny.prompt(80), 0, 0
    for turn in range(4):
        written = await engine.generate(ids, Sampling(max_tokens=30, seed=turn))
        cached += written.cached
        ids = [*ids, *written.ids]
        possible += len(ids) if turn < 3 else 0
        ids += tiny.prompt(10, seed=turn)
    assert cached >= 0.98 * possible


async def test_siblings_read_their_prompt_once(engine: TorchEngine) -> None:
    prompt, found = tiny.prompt(100), []

    async def sibling(seed: int) -> None:
        found.append((await engine.generate(prompt, Sampling(max_tokens=5, seed=seed), group="g")).cached)

    async with anyio.create_task_group() as tasks:
        for seed in range(8):
            tasks.start_soon(sibling, seed)
    assert sorted(found) == [0] + [99] * 7


async def test_a_cache_without_room_forgets_and_stays_right() -> None:
    model = tiny.model()
    async with TorchEngine(model, cache_bytes=60 * 1024) as engine:
        for seed in range(6):
            asked = tiny.prompt(40, seed=seed % 3)
            written = await engine.generate(asked, GREEDY)
            assert written.ids == tiny.greedy(model, asked, 24)
    async with TorchEngine(model, cache_bytes=0) as engine:
        await engine.generate(tiny.prompt(40), GREEDY)
        assert (await engine.generate(tiny.prompt(40), GREEDY)).cached == 0


REQUEST = st.tuples(
    st.integers(0, 3),
    st.integers(1, 70),
    st.builds(
        Sampling,
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.8, 1.0]),
        top_p=st.sampled_from([0.9, 1.0]),
        top_k=st.sampled_from([0, 5]),
        seed=st.integers(-5, 2**70),
    ),
)


async def _write(engine: TorchEngine, requests: list[tuple[int, int, Sampling]]) -> list[Written]:
    found: dict[int, Written] = {}

    async def one(index: int, seed: int, length: int, sampling: Sampling) -> None:
        found[index] = await engine.generate(tiny.prompt(length, seed=seed), sampling)

    async with anyio.create_task_group() as tasks:
        for index, request in enumerate(requests):
            tasks.start_soon(one, index, *request)
    return [found[index] for index in range(len(requests))]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "wide"])
def test_neighbours_change_neither_ids_nor_a_bit_of_a_logprob(family: str, threads: int) -> None:
    model = tiny.model(family)

    async def check(requests: list[tuple[int, int, Sampling]]) -> None:
        async with TorchEngine(model, rows=5) as engine:
            together = await _write(engine, requests)
        for request, written in zip(requests, together, strict=True):
            async with TorchEngine(model) as engine:
                (alone,) = await _write(engine, [request])
            assert (written.ids, written.logprobs, written.stop) == (alone.ids, alone.logprobs, alone.stop)

    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(REQUEST, min_size=2, max_size=12))
    def law(requests: list[tuple[int, int, Sampling]]) -> None:
        anyio.run(check, requests)

    torch.set_num_threads(threads)
    law()
    torch.set_num_threads(1)


async def test_siblings_are_read_as_one_until_they_are_sampled_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    model, owed = tiny.model(), []
    forward = Dense.__call__

    def counted(dense: Dense, pieces: list[Piece], slab: Slab) -> torch.Tensor:
        owed.append(len(pieces))
        return forward(dense, pieces, slab)

    monkeypatch.setattr(Dense, "__call__", counted)
    alike = [(0, 20, Sampling(max_tokens=length, temperature=0)) for length in (4, 9, 9, 6)]
    async with TorchEngine(model) as engine:
        for (_, length, sampling), written in zip(alike, await _write(engine, alike), strict=True):
            assert written.ids == tiny.greedy(model, tiny.prompt(length, seed=0), sampling.max_tokens)
    assert owed == [1] * 9

    apart = [(0, 20, Sampling(max_tokens=12 - seed, temperature=0.5, seed=seed)) for seed in range(8)]
    async with TorchEngine(model) as engine:
        owed.clear()
        together = await _write(engine, apart)
        most = list(owed)
    assert most[0] == 1 < max(most) <= 8
    for request, written in zip(apart, together, strict=True):
        async with TorchEngine(model) as engine:
            (alone,) = await _write(engine, [request])
        assert (written.ids, written.logprobs, written.stop) == (alone.ids, alone.logprobs, alone.stop)
    assert len({written.ids[:4] for written in together}) > 1


async def test_a_long_prompt_is_read_in_parts_beside_those_who_write() -> None:
    model = tiny.model("qwen2", seed=2)
    async with TorchEngine(model, rows=4) as engine:
        requests = [(seed, length, GREEDY) for seed, length in enumerate((550, 3, 560, 540, 9))]
        for (seed, length, _), written in zip(requests, await _write(engine, requests), strict=True):
            assert written.ids == tiny.greedy(model, tiny.prompt(length, seed=seed), 24)


async def test_a_seed_repeats_and_none_does_not(engine: TorchEngine) -> None:
    asked = tiny.prompt(20)

    async def write(seed: int | None) -> tuple[int, ...]:
        return (await engine.generate(asked, Sampling(max_tokens=20, temperature=2.0, seed=seed))).ids

    assert await write(7) == await write(7)
    assert len({await write(7), await write(8), await write(None), await write(None)}) == 4


async def test_a_stop_id_ends_the_turn_and_belongs_to_it(engine: TorchEngine) -> None:
    asked = tiny.prompt(20)
    free = (await engine.generate(asked, GREEDY)).ids
    stopped = await engine.generate(asked, Sampling(max_tokens=24, temperature=0, stop_ids=(free[5],)))
    assert stopped.ids == free[: free.index(free[5]) + 1]
    assert stopped.stop == "stop"


async def test_a_stop_string_ends_the_turn_at_the_id_that_completes_it() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    asked = tiny.prompt(20)
    async with TorchEngine(tiny.model(), decode=decode) as engine:
        free = (await engine.generate(asked, GREEDY)).ids
        word = f"{free[4]}><{free[5]}"
        stopped = await engine.generate(asked, Sampling(max_tokens=24, temperature=0, stop=("no", word)))
        assert stopped.ids == free[:6]
        assert stopped.stop == "stop"
        before = await engine.generate(
            asked, Sampling(max_tokens=3, temperature=0, stop=(f"<{asked[-1]}><{free[0]}>",))
        )
        assert before.stop == "length"


async def test_what_is_barred_is_never_written_and_its_logprob_not_shared_out(engine: TorchEngine) -> None:
    asked = tiny.prompt(20)
    barred = tuple(range(0, tiny.VOCABULARY, 2))
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=30, temperature=temperature, barred=barred, seed=1)
        written = await engine.generate(asked, sampling)
        assert not set(written.ids) & set(barred)
        expected = tiny.logprobs(tiny.model(), asked, written.ids, temperature or 1.0)
        assert written.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_full_context_ends_the_turn(engine: TorchEngine) -> None:
    written = await engine.generate(tiny.prompt(tiny.CONTEXT - 3), GREEDY)
    assert (len(written.ids), written.stop) == (3, "length")
    assert (await engine.generate(tiny.prompt(3), Sampling(max_tokens=0))).ids == ()


@pytest.mark.parametrize(
    ("asked", "sampling", "says"),
    [
        (tiny.prompt(tiny.CONTEXT), GREEDY, "no room in the model's context of 600"),
        ([], GREEDY, "no ids"),
        ([3, tiny.VOCABULARY], GREEDY, "vocabulary"),
        ([3, -1], GREEDY, "vocabulary"),
        ([3], Sampling(barred=(tiny.VOCABULARY,)), "barred"),
        ([3], Sampling(stop=("x",)), "`decode`"),
    ],
)
async def test_what_cannot_be_done_is_said_before_it_begins(
    engine: TorchEngine, asked: list[int], sampling: Sampling, says: str
) -> None:
    with pytest.raises(EngineError, match=says):
        await engine.generate(asked, sampling)
