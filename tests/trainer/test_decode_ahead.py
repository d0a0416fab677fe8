"""Parts of the torch engine: sampling against a reference, the prefix cache, and decoding ahead, as on CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from tests.trainer import tiny_models
from trainer.engine.base import EngineError, Generation, Sampling
from trainer.engine.torch import choose_holding, decode_ahead, paged_kv_cache
from trainer.engine.torch.continuous_batch import ContinuousBatch
from trainer.engine.torch.decode_ahead import DecodeAhead, DecodePlan, Step
from trainer.engine.torch.kv_cache import KVShape, PrefixCache
from trainer.engine.torch.paged_kv_cache import PAGE, PagedKVCache
from trainer.engine.torch.sampling import (
    Draw,
    fill_banned,
    filter_probabilities,
    filters_of,
    sample,
    sample_rows,
    uniform_noise,
)
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.ledger import common_length
from trainer.rollout.settings import BaseRolloutSettings

pytestmark = pytest.mark.usefixtures("one_thread")
Request = tuple[list[int], Sampling]


def make_engine(model: Any, **settings: Any) -> TorchEngine:
    return TorchEngine(model, **({"deterministic": False, "steps_ahead": 8} | settings))


def ahead_of(engine: TorchEngine) -> DecodeAhead:
    ahead = engine._ahead
    assert ahead is not None
    return ahead


def make_requests() -> list[Request]:
    """Siblings and others, from one token to several pages, with every kind of sampling."""
    samplings = [
        Sampling(max_tokens=21, temperature=0),
        Sampling(max_tokens=1, seed=1),
        Sampling(max_tokens=40, seed=2),
        Sampling(max_tokens=30, temperature=0.7, top_p=0.9, seed=3),
        Sampling(max_tokens=17, temperature=1.3, top_k=5, seed=4, banned_ids=tuple(range(0, 60, 3))),
        Sampling(max_tokens=40, seed=5, stop_ids=tuple(range(0, tiny_models.VOCAB_SIZE, 9))),
    ]
    prompts = [tiny_models.random_prompt(length, seed=length) for length in (1, 40, 120, 300)]
    return [(prompt, sampling) for prompt in prompts for sampling in samplings]


async def generate_all(engine: TorchEngine, requests: list[Request]) -> list[Generation]:
    results: dict[int, Generation] = {}

    async def generate(index: int, ids: list[int], sampling: Sampling) -> None:
        results[index] = await engine.generate(ids, sampling)

    with anyio.fail_after(120):
        async with engine, anyio.create_task_group() as tasks:
            for index, request in enumerate(requests):
                tasks.start_soon(generate, index, *request)
    return [results[index] for index in range(len(requests))]


def assert_equal(ones: list[Generation], others: list[Generation]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def record(step: Step, _stream: object) -> Callable[[], object]:
    """What a CUDA graph does, on a CPU: two runs, then the operations as they were, on tensors where they were."""
    step()
    step()
    with torch.no_grad():
        recorded: Callable[[], object] = make_fx(step)()
    return recorded


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "biased"])
async def test_recorded_steps_sample_the_same_ids_whatever_is_in_the_batch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_ahead, "capture", record)
    model, requests = tiny_models.load_model(family), make_requests()
    engine = make_engine(model, max_sequences=10)
    ahead_of(engine)._modes = [(False, True), (False, False)]
    expected = await generate_all(TorchEngine(model, deterministic=False), requests)
    assert_equal(await generate_all(engine, requests), expected)
    assert engine.sampled_tokens == sum(len(generation.ids) for generation in expected)
    assert engine.capabilities.notes == () and len(ahead_of(engine)._prepared) > len(ahead_of(engine)._sizes)


async def test_published_weights_reach_steps_that_were_recorded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ahead, "capture", record)
    prompt, sampling = tiny_models.random_prompt(20), Sampling(max_tokens=20, temperature=0)
    old, new = tiny_models.load_model("qwen2"), tiny_models.load_model("qwen2", seed=1)
    engine = make_engine(old)
    ahead_of(engine)._modes = [(False, True), (False, False)]
    async with engine:
        assert (await engine.generate(prompt, sampling)).ids == tiny_models.generate_greedy(old, prompt, 20)
        recorded = dict(ahead_of(engine)._prepared)
        await engine.publish(new.state_dict(), 1)
        assert (await engine.generate(prompt, sampling)).ids == tiny_models.generate_greedy(new, prompt, 20)
        assert ahead_of(engine)._prepared == recorded


async def test_host_looks_at_what_was_sampled_once_in_eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, looks = [], []
    step, run = DecodeAhead._step, DecodeAhead.run
    monkeypatch.setattr(DecodeAhead, "_step", lambda *all_of_it: steps.append(1) or step(*all_of_it))
    monkeypatch.setattr(DecodeAhead, "run", lambda *all_of_it: looks.append(1) or run(*all_of_it))
    requests = [(tiny_models.random_prompt(9, seed=seed), Sampling(max_tokens=41, seed=seed)) for seed in range(5)]
    await generate_all(make_engine(tiny_models.load_model()), requests)
    assert (len(steps), len(looks)) == (40, 5), "one id comes with the prompt"


async def test_stop_string_within_eight_steps_ends_the_generation_there() -> None:
    def decode(ids: Any) -> str:
        return "".join(f"<{token}>" for token in ids)

    prompt, sampling = tiny_models.random_prompt(20), Sampling(max_tokens=24, temperature=0)
    unstopped = tiny_models.generate_greedy(tiny_models.load_model(), prompt, 24)
    stop = Sampling(max_tokens=24, temperature=0, stop=(f"{unstopped[4]}><{unstopped[5]}",))
    async with make_engine(tiny_models.load_model(), decode=decode) as engine:
        stopped = await engine.generate(prompt, stop)
        assert (stopped.ids, stopped.finish_reason) == (unstopped[:6], "stop")
        again = await engine.generate([*prompt, *stopped.ids], sampling)
    assert again.cached_tokens == len(prompt) + 5
    expected = tiny_models.generate_greedy(tiny_models.load_model(), [*prompt, *stopped.ids], 24)
    assert again.ids == expected, "what was sampled after the end is not in the prefix cache"


async def test_sequences_without_a_free_page_wait_and_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.load_model()
    requests = [(tiny_models.random_prompt(100, seed=seed), Sampling(max_tokens=200, seed=seed)) for seed in range(6)]
    expected = await generate_all(TorchEngine(model, deterministic=False), requests)
    monkeypatch.setattr(paged_kv_cache, "plan_pages", lambda *_: 9)
    engine = make_engine(model, cache_bytes=0)
    removed, make_room = [], ContinuousBatch._make_room

    def count_removed(batch: ContinuousBatch, ahead: DecodeAhead) -> None:
        before = len(batch.lanes)
        make_room(batch, ahead)
        removed.append(before - len(batch.lanes))

    monkeypatch.setattr(ContinuousBatch, "_make_room", count_removed)
    assert_equal(await generate_all(engine, requests), expected)
    assert any(removed), "some had begun"
    assert engine.capabilities.notes[0].startswith("has room for 2% of its keys and values: lower `concurrency.run")
    cache = ahead_of(engine).kv_cache
    assert len(cache._unused) == 8 and not any(cache._uses), "all pages are free in the end"


async def test_sequence_longer_than_all_pages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_kv_cache, "plan_pages", lambda *_: 4)
    async with make_engine(tiny_models.load_model()) as engine:
        with pytest.raises(EngineError, match=r"lower `concurrency.running_requests` .*no room for 3\d\d tokens"):
            await engine.generate(tiny_models.random_prompt(200), Sampling(max_tokens=300, temperature=0))
        short = await engine.generate(tiny_models.random_prompt(20), Sampling(max_tokens=9, temperature=0))
    assert short.ids == tiny_models.generate_greedy(tiny_models.load_model(), tiny_models.random_prompt(20), 9)


async def test_what_fails_on_a_device_is_told_once_by_what_failed_first_and_costs_no_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_step: Step, _place: object) -> Step:
        try:
            raise ValueError("an operation that waits for the host")
        except ValueError:
            raise RuntimeError("the capture was invalidated by an earlier error")  # noqa: B904 - as torch does

    monkeypatch.setattr(decode_ahead, "capture", fail)
    monkeypatch.setattr(decode_ahead, "make_place", lambda _: "another place")
    engine, requests = make_engine(tiny_models.load_model()), make_requests()
    ahead_of(engine)._modes = [(True, True), (False, True), (False, False)]
    expected = await generate_all(TorchEngine(tiny_models.load_model(), deterministic=False), requests)
    assert_equal(await generate_all(engine, requests), expected)
    first, second = engine.capabilities.notes
    assert first.startswith("decodes without FlexAttention in CUDA graphs, ")
    assert second.startswith("decodes without CUDA graphs, ") and ahead_of(engine)._place == "another place"
    assert first.endswith("ValueError: an operation that waits for the host")
    for note, record in zip((first, second), caplog.records, strict=True):
        assert note in record.getMessage() and "invalidated by an earlier error" in str(record.exc_text)


class Stream:
    """A stream of CUDA with those that it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other)


def test_streams_wait_for_each_other_also_around_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    current, own, steps = Stream(), Stream(), []
    stubs = {"CUDAGraph": object, "graph": lambda *_, **_options: nullcontext(), "stream": lambda _: nullcontext()}
    for name, stub in {**stubs, "current_stream": lambda: current}.items():
        monkeypatch.setattr(torch.cuda, name, stub)

    def fail_in_capture() -> None:
        steps.append(len(current.awaited))
        if len(steps) == 3:
            raise ValueError("an operation that waits for the host")

    with pytest.raises(ValueError, match="waits for the host"):
        decode_ahead.capture(fail_in_capture, (own, "pool"))  # type: ignore[arg-type]
    assert steps == [0, 0, 0] and own.awaited == [current] and current.awaited == [own]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as on a CPU
@pytest.mark.parametrize("queries", [1, 6])
def test_flex_attention_equals_attention_to_gathered_pages(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ahead, "flex_kernel", lambda: flex_attention)
    torch.manual_seed(0)
    cache = PagedKVCache(KVShape(1, 2, 16, torch.float32, torch.device("cpu")), slots=4, pages=24)
    cache.values.copy_(torch.randn_like(cache.values))
    lengths = [1, PAGE, PAGE + 1, 5 * PAGE - 3]
    cache.reserve(dict(enumerate(lengths)), 4)
    table = cache.table(range(4))
    first = torch.full((4, cache.pages), decode_ahead.UNSEEN, dtype=torch.int32)
    first.scatter_(1, table, torch.arange(0, table.shape[1] * PAGE, PAGE, dtype=torch.int32).expand(4, -1))
    first[:, 0] = decode_ahead.UNSEEN
    positions, asked = torch.tensor(lengths) - 1, torch.randn(4, 2 * queries, 16)
    gathered, by_flex = (DecodePlan(table, positions, mask).attend(asked, cache.values[0]) for mask in (None, first))
    assert torch.allclose(gathered, by_flex, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "deterministic", "trained", "device", "expected"),
    [
        ("auto", None, "auto", "cuda", True),
        ("auto", None, "float32", "cuda", False),
        ("auto", True, "auto", "cuda", False),
        ("float32", None, "auto", "cuda", False),
        ("bfloat16", None, "float32", "cuda", True),
        ("bfloat16", None, "auto", "cpu", False),
    ],
)
def test_engine_computes_in_bfloat16_on_cuda_unless_exactness_is_asked_for(
    dtype: Any, deterministic: bool | None, trained: str, device: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    settings = BaseRolloutSettings(engine_dtype=dtype, deterministic=deterministic)
    assert choose_holding.is_half(settings.engine_precision, device, trained) is expected


def test_bfloat16_that_is_to_be_deterministic_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"leave it, or `engine_dtype: bfloat16`, out"):
        BaseRolloutSettings(engine_dtype="bfloat16", deterministic=True)


def test_engine_in_bfloat16_runs_ahead_near_the_exact_logprobs() -> None:
    prompt = tiny_models.random_prompt(30)
    half = tiny_models.build_qwen2()
    exact = tiny_models.build_qwen2()
    rotation = half.model.rotary_emb.inv_freq.clone()
    half.to(torch.bfloat16).model.rotary_emb.inv_freq = rotation  # as `load_model` leaves it

    async def generate() -> Generation:
        async with make_engine(half, holding="bfloat16", deterministic=True) as engine:
            assert not engine.capabilities.is_exact and "bfloat16" in engine.capabilities.notes[0]
            assert ahead_of(engine).kv_cache.values.dtype is torch.bfloat16
            return await engine.generate(prompt, Sampling(max_tokens=30, seed=1))

    written = anyio.run(generate)
    expected = tiny_models.compute_logprobs(exact, prompt, written.ids, 1.0)
    assert 1e-5 < max(abs(one - other) for one, other in zip(written.logprobs, expected, strict=True)) < 0.5


VOCAB_SIZE = 12
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    banned_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=VOCAB_SIZE - 1).map(lambda ids: tuple(sorted(ids))),
    seed=st.integers(0, 2**64),
)
ROWS = st.lists(st.tuples(LOGITS, SAMPLING, st.integers(0, 10**6)), min_size=1, max_size=6)


def filter_reference(logits: list[float], sampling: Sampling) -> tuple[set[int], set[int]]:
    """Ids that certainly pass the filters, and those that may, depending on rounding."""
    scaled = np.array(logits, dtype=np.float64) / (sampling.temperature or 1.0)
    probabilities = np.exp(scaled - scaled.max())
    probabilities[list(sampling.banned_ids)] = 0
    probabilities /= probabilities.sum()
    certain, possible = set(), set()
    for token, probability in enumerate(probabilities):
        likelier = probabilities[probabilities > probability]
        ties_before = sum(probabilities[:token] == probability)
        mass = likelier.sum() + ties_before * probability
        for slack, passing in ((-1e-5, certain), (1e-5, possible)):
            passes = not sampling.top_k or len(likelier) + ties_before < sampling.top_k
            passes &= sampling.top_p >= 1 or mass < sampling.top_p + slack
            if token not in sampling.banned_ids and (passes or len(likelier) + ties_before == 0):
                passing.add(token)
    return certain, possible


def make_draws(rows: list[tuple[list[float], Sampling, int]]) -> list[Draw]:
    return [Draw(sampling, sampling.seed or 0, position) for _, sampling, position in rows]


@settings(deadline=None)
@given(ROWS)
def test_filters_agree_with_the_reference(rows: list[tuple[list[float], Sampling, int]]) -> None:
    samplings = [sampling for _, sampling, _ in rows]
    scaled = torch.tensor([logits for logits, _, _ in rows]) / torch.tensor([[s.temperature or 1.0] for s in samplings])
    probabilities = filter_probabilities(scaled.log_softmax(-1), samplings)
    for (logits, sampling, _), row in zip(rows, probabilities.tolist(), strict=True):
        remaining = {token for token, probability in enumerate(row) if probability > 0}
        certain, possible = filter_reference(logits, sampling)
        ties = len({round(value, 4) for value in logits}) < VOCAB_SIZE
        assert len(remaining) in range(len(certain), len(possible) + 1) if ties else certain <= remaining <= possible


@settings(deadline=None)
@given(ROWS)
def test_sampling_without_the_host_chooses_the_same_ids(rows: list[tuple[list[float], Sampling, int]]) -> None:
    logits, draws = torch.tensor([logits for logits, _, _ in rows]), make_draws(rows)
    samplings = [sampling for _, sampling, _ in rows]
    is_banned = torch.zeros(logits.shape, dtype=torch.bool)
    fill_banned(is_banned, samplings, 1.0)
    noise = uniform_noise([draw.seed for draw in draws], [draw.position for draw in draws])
    top_k, top_p = torch.tensor([filters_of(sampling, VOCAB_SIZE) for sampling in samplings], dtype=torch.float64).T
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
    is_greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings])
    rows_of = torch.from_numpy(noise), temperatures, is_greedy, is_banned
    ids, logprobs = sample_rows(logits, *rows_of, (top_k, top_p))
    assert (ids.tolist(), logprobs.tolist()) == sample(logits, draws)


def test_frequencies_match_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 20_000
    ids, _ = sample(logits.expand(count, -1), [Draw(Sampling(), seed, seed % 7) for seed in range(count)])
    expected = logits.softmax(-1)[0].tolist()
    for token, share in Counter(ids).items():
        assert share / count == pytest.approx(expected[token], abs=0.015)


def test_noise_is_uniform_over_positions_and_over_seeds() -> None:
    count = 10_000
    for seeds, positions in (([3] * count, range(count)), (range(count), [3] * count)):
        noise = uniform_noise(list(seeds), list(positions))
        assert 0 <= noise.min() <= noise.max() < 1
        assert np.histogram(noise, bins=10, range=(0, 1))[0] == pytest.approx([count / 10] * 10, rel=0.12)
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03


IDS = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def make_values(ids: Sequence[int]) -> Tensor:
    """A value for each position which depends on all ids up to it, as keys and values do."""
    hashes = [hash(tuple(ids[: index + 1])) % 10**6 for index in range(len(ids))]
    return torch.tensor(hashes, dtype=torch.float32).view(1, 1, 1, -1, 1)


def insert_ids(cache: PrefixCache, ids: Sequence[int]) -> int:
    """Inserts ids, and returns how many positions were read."""
    read = []

    def read_slot(start: int, end: int) -> Tensor:
        read.append(end - start)
        return make_values(ids)[:, :, :, start:end]

    cache.insert(ids, read_slot)
    return sum(read)


def read_values(cache: PrefixCache, ids: Sequence[int]) -> Tensor:
    return torch.cat([torch.zeros(1, 1, 1, 0, 1), *cache.read(ids)], dim=3)


@settings(deadline=None)
@given(st.integers(0, 15) | st.just(10**6), st.lists(st.tuples(st.booleans(), IDS), max_size=40))
def test_cache_stays_within_its_size_and_returns_the_longest_prefix_that_it_has(
    max_tokens: int, operations: list[tuple[bool, tuple[int, ...]]]
) -> None:
    cache, inserted = PrefixCache(max_tokens), set[tuple[int, ...]]()
    for is_insert, ids in operations:
        longest = max((common_length(ids, other) for other in inserted), default=0)
        values = read_values(cache, ids)
        assert torch.equal(values, make_values(ids)[:, :, :, : values.shape[3]])
        assert values.shape[3] == cache.match(ids) <= longest
        if max_tokens == 10**6:
            assert cache.match(ids) == longest
            assert cache.tokens == len({each[:end] for each in inserted for end in range(1, len(each) + 1)})
        if is_insert:
            read = insert_ids(cache, ids)
            inserted.add(ids)
            assert max_tokens < 10**6 or read == len(ids) - longest
            assert cache.match(ids) == len(ids) or len(ids) > max_tokens
        assert cache.tokens <= max_tokens


def test_least_recently_used_leaf_is_evicted_first() -> None:
    cache = PrefixCache(6)
    insert_ids(cache, (1, 2, 3))
    insert_ids(cache, (1, 2, 4))
    insert_ids(cache, (5, 6))
    read_values(cache, (1, 2, 3))
    insert_ids(cache, (7,))
    assert [cache.match(ids) for ids in ((1, 2, 3), (1, 2, 4), (5, 6), (7,))] == [3, 2, 2, 1]
    insert_ids(cache, (8, 8))
    assert [cache.match(ids) for ids in ((1, 2, 3), (5, 6), (7,), (8, 8))] == [3, 0, 1, 2]
