"""The torch engine: generations equal the model's own, whatever is beside them, cached, published or cancelled."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer import tiny_models
from trainer.engine.base import FEWER_SEQUENCES, EngineError, Generation, Sampling
from trainer.engine.torch import continuous_batch
from trainer.engine.torch.continuous_batch import ContinuousBatch
from trainer.engine.torch.dense_model import DenseModel
from trainer.engine.torch.kv_cache import Chunk, KVCache
from trainer.engine.torch.torch_engine import TorchEngine

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = Sampling(max_tokens=24, temperature=0)
DENSE_FAMILIES = ["qwen3", "qwen2", "llama", "biased"]
LONG, SHORT = (Sampling(max_tokens=tokens, temperature=0) for tokens in (500, 6))


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    with anyio.fail_after(60):
        async with TorchEngine(tiny_models.load_model()) as engine:
            yield engine


class StepGate:
    """Blocks the engine's steps after this many, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self._steps_left, self._is_open, self.reached = steps, threading.Event(), anyio.Event()
        self.sequence_counts: list[int] = []
        token, step = anyio.lowlevel.current_token(), ContinuousBatch._step

        def gated_step(batch: ContinuousBatch) -> list[object]:
            if self._steps_left == 0:
                anyio.from_thread.run_sync(self.reached.set, token=token)
                assert self._is_open.wait(30)
            self._steps_left -= 1
            self.sequence_counts.append(len(batch.sequences))
            return step(batch)

        monkeypatch.setattr(ContinuousBatch, "_step", gated_step)

    def open(self) -> None:
        self._is_open.set()


async def require_working(engine: TorchEngine) -> None:
    prompt = tiny_models.random_prompt(10)
    expected = tiny_models.generate_greedy(tiny_models.load_model(), prompt, 6)
    assert (await engine.generate(prompt, SHORT)).ids == expected


@pytest.mark.parametrize("family", [*DENSE_FAMILIES, "mistral"])
async def test_greedy_ids_equal_those_of_generate(family: str) -> None:
    model = tiny_models.load_model(family)
    async with TorchEngine(model) as engine:
        for length in (1, 7, 290):
            prompt = tiny_models.random_prompt(length)
            generation = await engine.generate(prompt, GREEDY)
            assert generation.ids == tiny_models.generate_greedy(model, prompt, 24)
            assert generation.finish_reason == "length"


@pytest.mark.parametrize("family", [*DENSE_FAMILIES, "mistral"])
async def test_logprobs_equal_a_forward_pass_over_the_whole_sequence(family: str) -> None:
    model = tiny_models.load_model(family)
    sampling = Sampling(max_tokens=40, temperature=0.7, top_k=20, seed=3)
    async with TorchEngine(model) as engine:
        prompt = tiny_models.random_prompt(30)
        first = await engine.generate(prompt, sampling)
        longer_prompt = [*prompt, *first.ids, *tiny_models.random_prompt(9, seed=2)]
        second = await engine.generate(longer_prompt, sampling)
    assert second.cached_tokens == len(prompt) + len(first.ids) - 1
    for ids, generation in ((prompt, first), (longer_prompt, second)):
        expected = tiny_models.compute_logprobs(model, ids, generation.ids, 0.7)
        assert max(abs(a - b) for a, b in zip(expected, generation.logprobs, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "its rope is dynamic"),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "some of its layers do not have full attention",
        ),
    ],
)
async def test_unsupported_configuration_runs_through_the_models_own_module(changes: Any, reason: str) -> None:
    model = tiny_models.build_qwen2(**changes)
    async with TorchEngine(model) as engine:
        assert reason in engine.capabilities.notes[0]
        generation = await engine.generate(tiny_models.random_prompt(30), GREEDY)
    assert generation.ids == tiny_models.generate_greedy(model, tiny_models.random_prompt(30), 24)


def test_models_own_module_in_bfloat16_is_noted() -> None:
    model = tiny_models.build_qwen2(hidden_act="gelu").bfloat16()
    capabilities = TorchEngine(model).capabilities
    assert not capabilities.is_exact and capabilities.notes[1].startswith("computes products in bfloat16")


async def test_small_prefix_cache_evicts_and_ids_stay_correct() -> None:
    model = tiny_models.load_model()
    async with TorchEngine(model, cache_bytes=60 * 1024) as engine:
        for seed in range(6):
            prompt = tiny_models.random_prompt(40, seed=seed % 3)
            generation = await engine.generate(prompt, GREEDY)
            assert generation.ids == tiny_models.generate_greedy(model, prompt, 24)
    async with TorchEngine(model, cache_bytes=0) as engine:
        await engine.generate(tiny_models.random_prompt(40), GREEDY)
        assert (await engine.generate(tiny_models.random_prompt(40), GREEDY)).cached_tokens == 0


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


async def _generate_all(engine: TorchEngine, requests: list[tuple[int, int, Sampling]]) -> list[Generation]:
    results: dict[int, Generation] = {}

    async def generate(index: int, seed: int, length: int, sampling: Sampling) -> None:
        results[index] = await engine.generate(tiny_models.random_prompt(length, seed=seed), sampling)

    async with anyio.create_task_group() as tasks:
        for index, request in enumerate(requests):
            tasks.start_soon(generate, index, *request)
    return [results[index] for index in range(len(requests))]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "wide"])
def test_other_sequences_change_no_id_and_no_bit_of_a_logprob(family: str, threads: int) -> None:
    model = tiny_models.load_model(family)

    async def check(requests: list[tuple[int, int, Sampling]]) -> None:
        async with TorchEngine(model, max_sequences=5) as engine:
            batched = await _generate_all(engine, requests)
        for request, generation in zip(requests, batched, strict=True):
            async with TorchEngine(model) as engine:
                (alone,) = await _generate_all(engine, [request])
            assert (generation.ids, generation.logprobs, generation.finish_reason) == (
                alone.ids,
                alone.logprobs,
                alone.finish_reason,
            )

    @settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(REQUEST, min_size=2, max_size=9))
    def run(requests: list[tuple[int, int, Sampling]]) -> None:
        anyio.run(check, requests)

    torch.set_num_threads(threads)
    run()
    torch.set_num_threads(1)


@pytest.fixture
def chunk_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step computes."""
    counts, forward = [], DenseModel.__call__

    def count_chunks(model: DenseModel, chunks: list[Chunk], kv_cache: KVCache) -> torch.Tensor:
        counts.append(len(chunks))
        return forward(model, chunks, kv_cache)

    monkeypatch.setattr(DenseModel, "__call__", count_chunks)
    return counts


async def test_siblings_share_a_lane_as_long_as_they_sample_the_same_ids(chunk_counts: list[int]) -> None:
    model = tiny_models.load_model()
    same_prompts = [(0, 20, Sampling(max_tokens=length, temperature=0)) for length in (4, 9, 9, 6)]
    async with TorchEngine(model) as engine:
        for (_, length, sampling), generation in zip(
            same_prompts, await _generate_all(engine, same_prompts), strict=True
        ):
            assert generation.ids == tiny_models.generate_greedy(
                model, tiny_models.random_prompt(length, seed=0), sampling.max_tokens
            )
    assert chunk_counts == [1] * 9


async def test_long_prompts_are_prefilled_in_chunks_next_to_decoding(
    monkeypatch: pytest.MonkeyPatch, chunk_counts: list[int]
) -> None:
    monkeypatch.setattr(continuous_batch, "MAX_STEP_TOKENS", 32)
    model = tiny_models.load_model("qwen2", seed=2)
    # The first ends early, and the long prompt takes its place before the second, which goes on.
    requests = [(seed, length, Sampling(max_tokens=most, temperature=0)) for seed, length, most in
                ((0, 3, 4), (1, 9, 24), (2, 560, 24))]  # fmt: skip
    async with TorchEngine(model, max_sequences=4) as engine:
        generations = await _generate_all(engine, requests)
    for (seed, length, sampling), generation in zip(requests, generations, strict=True):
        prompt = tiny_models.random_prompt(length, seed=seed)
        assert generation.ids == tiny_models.generate_greedy(model, prompt, sampling.max_tokens)
    assert chunk_counts[4:17] == [2] * 13, "an id and a chunk in each step"


async def test_seed_repeats_the_generation(engine: TorchEngine) -> None:
    prompt = tiny_models.random_prompt(20)

    async def generate_ids(seed: int | None) -> tuple[int, ...]:
        return (await engine.generate(prompt, Sampling(max_tokens=20, temperature=2.0, seed=seed))).ids

    assert await generate_ids(7) == await generate_ids(7)
    assert len({await generate_ids(7), await generate_ids(8), await generate_ids(None), await generate_ids(None)}) == 4


async def test_stop_string_ends_the_generation_at_the_id_that_completes_it() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    prompt = tiny_models.random_prompt(20)
    async with TorchEngine(tiny_models.load_model(), decode=decode) as engine:
        unstopped = (await engine.generate(prompt, GREEDY)).ids
        stop_string = f"{unstopped[4]}><{unstopped[5]}"
        stopped = await engine.generate(prompt, Sampling(max_tokens=24, temperature=0, stop=("no", stop_string)))
        assert stopped.ids == unstopped[:6]
        assert stopped.finish_reason == "stop"
        unaffected = await engine.generate(
            prompt, Sampling(max_tokens=3, temperature=0, stop=(f"<{prompt[-1]}><{unstopped[0]}>",))
        )
        assert unaffected.finish_reason == "length"


async def test_banned_ids_are_never_sampled_and_do_not_change_logprobs(engine: TorchEngine) -> None:
    prompt = tiny_models.random_prompt(20)
    banned_ids = tuple(range(0, tiny_models.VOCAB_SIZE, 2))
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=30, temperature=temperature, banned_ids=banned_ids, seed=1)
        generation = await engine.generate(prompt, sampling)
        assert not set(generation.ids) & set(banned_ids)
        expected = tiny_models.compute_logprobs(tiny_models.load_model(), prompt, generation.ids, temperature or 1.0)
        assert generation.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        (tiny_models.random_prompt(tiny_models.CONTEXT_LENGTH), GREEDY, "no room in the model's context of 600"),
        ([], GREEDY, "no ids"),
        ([3, tiny_models.VOCAB_SIZE], GREEDY, "vocabulary"),
        ([3], Sampling(banned_ids=(tiny_models.VOCAB_SIZE,)), "banned_ids"),
        ([3], Sampling(stop=("x",)), "`decode`"),
    ],
)
async def test_invalid_requests_are_rejected(
    engine: TorchEngine, prompt: list[int], sampling: Sampling, reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        await engine.generate(prompt, sampling)


async def test_logprobs_are_exact_before_and_after_a_publish_during_a_generation(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, prompt, results = StepGate(monkeypatch, 10), tiny_models.random_prompt(30), []
    old, new = tiny_models.load_model(), tiny_models.load_model(seed=1)

    async def generate() -> None:
        results.append(await engine.generate(prompt, Sampling(max_tokens=20, temperature=0)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await gate.reached.wait()
        tasks.start_soon(engine.publish, new.state_dict(), 1)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    (generation,) = results
    first_count = generation.versions.count(0)
    assert first_count in {10, 11} and generation.versions == (0,) * first_count + (engine.version,) * (
        20 - first_count
    )
    assert generation.ids[:first_count] == tiny_models.generate_greedy(old, prompt, first_count)
    assert generation.ids[first_count:] == tiny_models.generate_greedy(
        new, [*prompt, *generation.ids[:first_count]], 20 - first_count
    )
    expected = (
        tiny_models.compute_logprobs(old, prompt, generation.ids, 1.0)[:first_count]
        + tiny_models.compute_logprobs(new, prompt, generation.ids, 1.0)[first_count:]
    )
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
async def test_publish_clears_the_prefix_cache(family: str) -> None:
    prompt, new = tiny_models.random_prompt(40), tiny_models.load_model(family, seed=1)
    async with TorchEngine(tiny_models.load_model(family)) as engine:
        await engine.generate(prompt, SHORT)
        await engine.publish(new.state_dict(), 5)
        generation = await engine.generate(prompt, SHORT)
        assert (generation.cached_tokens, generation.version) == (0, 5)
        assert generation.ids == tiny_models.generate_greedy(new, prompt, 6)
        assert (await engine.generate(prompt, SHORT)).cached_tokens == 39


async def test_weights_of_another_model_are_rejected_unchanged() -> None:
    model, prompt = tiny_models.load_model(), tiny_models.random_prompt(10)
    good_state = dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    async with TorchEngine(model) as engine:
        for bad_state, reason in (
            ({key: value for key, value in good_state.items() if key != name}, f"1 missing, as '{name}'"),
            ({**good_state, "adapter": torch.zeros(1)}, "1 unknown, as 'adapter'"),
            ({**good_state, name: torch.zeros(3, 3)}, "shape"),
        ):
            with pytest.raises(EngineError, match=reason):
                await engine.publish(bad_state, 1)
        assert (await engine.generate(prompt, SHORT)).ids == tiny_models.generate_greedy(model, prompt, 6)
        assert engine.version == 0


async def test_cancelled_request_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(60):
        async with TorchEngine(tiny_models.load_model(), max_sequences=1) as engine:
            gate = StepGate(monkeypatch, 5)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, tiny_models.random_prompt(10), LONG)
                await gate.reached.wait()
                tasks.cancel_scope.cancel()
            gate.open()
            generation = await engine.generate(tiny_models.random_prompt(20), SHORT)
            assert generation.ids == tiny_models.generate_greedy(
                tiny_models.load_model(), tiny_models.random_prompt(20), 6
            )
            assert set(gate.sequence_counts) == {1}
            assert len(gate.sequence_counts) < 20


async def test_late_sibling_waits_for_a_prompt_that_is_being_prefilled(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous_batch, "MAX_STEP_TOKENS", 32)
    gate, prompt, results = StepGate(monkeypatch, 1), tiny_models.random_prompt(120), []

    async def generate() -> None:
        results.append(await engine.generate(prompt, SHORT))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await gate.reached.wait()
        for _ in range(3):
            tasks.start_soon(generate)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert sorted(generation.cached_tokens for generation in results) == [0, *[len(prompt) - 1] * 3]


async def test_leaving_the_engine_ends_generations_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[str] = []

    async def generate(engine: TorchEngine) -> None:
        try:
            await engine.generate(tiny_models.random_prompt(10), LONG)
        except EngineError as error:
            results.append(str(error))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks, TorchEngine(tiny_models.load_model()) as engine:
            gate = StepGate(monkeypatch, 5)
            tasks.start_soon(generate, engine)
            await gate.reached.wait()
            gate.open()
    assert results == ["the engine was closed"]
    with pytest.raises(EngineError, match="not open"):
        await engine.generate(tiny_models.random_prompt(10), SHORT)


async def test_engine_leaves_no_thread_or_reference_behind() -> None:
    threads = threading.active_count()
    async with TorchEngine(tiny_models.load_model()) as engine:
        await engine.generate(tiny_models.random_prompt(10), SHORT)
        engine_reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert engine_reference() is None
    assert threading.active_count() <= threads + 1  # The event loop's pool keeps its idle worker.


async def test_embedded_engine_reports_ids_of_those_who_ask_while_all_generate(engine: TorchEngine) -> None:
    prompt, seen = tiny_models.random_prompt(30), list[int]()
    results = {}

    async def generate(seed: int) -> None:
        on_ids = seen.extend if seed == 1 else None
        results[seed] = await engine.generate(prompt, Sampling(max_tokens=40, seed=seed), on_ids=on_ids)

    async with anyio.create_task_group() as tasks:
        for seed in range(3):
            tasks.start_soon(generate, seed)
    assert tuple(seen) == results[1].ids and len(seen) == 40
    alone = await engine.generate(prompt, Sampling(max_tokens=40, seed=1))
    assert alone.ids == results[1].ids


def raises(error: Exception) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        ("paged_attention.AttentionPlan.attend", RuntimeError("a kernel broke"), "RuntimeError: a kernel broke"),
        ("paged_attention.AttentionPlan.attend", torch.OutOfMemoryError("20 GiB"), "out of memory"),
        ("kv_cache.KVCache.ensure_length", RuntimeError("can't allocate memory"), FEWER_SEQUENCES),
        ("kv_cache.KVCache.read", MemoryError(), "out of memory"),
        ("kv_cache.PrefixCache.insert", MemoryError(), "out of memory"),
        ("continuous_batch.sample", MemoryError(), FEWER_SEQUENCES),
    ],
)
async def test_failure_ends_every_sequence_but_not_the_engine(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception, reason: str
) -> None:
    errors = []

    async def generate(seed: int) -> None:
        try:
            await engine.generate(tiny_models.random_prompt(10, seed=seed), SHORT)
        except EngineError as failure:
            errors.append(str(failure))

    with monkeypatch.context() as broken:
        broken.setattr(f"trainer.engine.torch.{function}", raises(error))
        async with anyio.create_task_group() as tasks:
            for seed in (1, 2, 2):
                tasks.start_soon(generate, seed)
    assert [reason in text for text in errors] == [True] * 3
    await require_working(engine)


async def test_non_finite_weights_are_reported(engine: TorchEngine) -> None:
    good_state = tiny_models.load_model().state_dict()
    await engine.publish({name: tensor * torch.nan for name, tensor in good_state.items()}, 3)
    with pytest.raises(EngineError, match="not finite under version 3"):
        await engine.generate(tiny_models.random_prompt(10), SHORT)
    await engine.publish(good_state, 4)
    await require_working(engine)
