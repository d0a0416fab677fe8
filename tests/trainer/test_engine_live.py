"""What happens to those who write while weights, orders and accidents come in."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable

import anyio
import pytest
import torch

from gateway.types import Image
from tests.trainer import tiny
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.torch import TorchEngine, batch
from trainer.engine.torch.batch import Batch

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = Sampling(max_tokens=500, temperature=0)
SHORT = Sampling(max_tokens=6, temperature=0)


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    with anyio.fail_after(60):
        async with TorchEngine(tiny.model()) as engine:
            yield engine


class Gate:
    """Lets so many steps through, and no more until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self._left, self._open, self.reached = steps, threading.Event(), anyio.Event()
        self.rows: list[int] = []
        token = anyio.lowlevel.current_token()
        step = Batch._step

        def slow(batch: Batch) -> list[object]:
            if self._left == 0:
                anyio.from_thread.run_sync(self.reached.set, token=token)
                assert self._open.wait(30)
            self._left -= 1
            self.rows.append(len(batch.rows))
            return step(batch)

        monkeypatch.setattr(Batch, "_step", slow)

    def open(self) -> None:
        self._open.set()


async def test_a_new_version_in_midst_of_writing_is_exact_on_both_sides(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked, found = Gate(monkeypatch, 10), tiny.prompt(30), []
    old, new = tiny.model(), tiny.model(seed=1)

    async def write() -> None:
        found.append(await engine.generate(asked, Sampling(max_tokens=20, temperature=0)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await gate.reached.wait()
        tasks.start_soon(engine.publish, new.state_dict(), 1)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    (written,) = found
    first = written.versions.count(0)
    assert first in {10, 11} and written.versions == (0,) * first + (engine.version,) * (20 - first)
    assert written.ids[:first] == tiny.greedy(old, asked, first)
    assert written.ids[first:] == tiny.greedy(new, [*asked, *written.ids[:first]], 20 - first)
    expected = tiny.logprobs(old, asked, written.ids, 1.0)[:first] + tiny.logprobs(new, asked, written.ids, 1.0)[first:]
    assert written.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral"])
async def test_a_version_knows_nothing_of_the_one_before(family: str) -> None:
    asked, new = tiny.prompt(40), tiny.model(family, seed=1)
    async with TorchEngine(tiny.model(family)) as engine:
        await engine.generate(asked, SHORT)
        await engine.publish(new.state_dict(), 5)
        written = await engine.generate(asked, SHORT)
        assert (written.cached, written.version) == (0, 5)
        assert written.ids == tiny.greedy(new, asked, 6)
        assert (await engine.generate(asked, SHORT)).cached == 39


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
async def test_weights_of_another_model_change_nothing(family: str) -> None:
    model, asked = tiny.model(family), tiny.prompt(10)
    good = dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    async with TorchEngine(model) as engine:
        for bad, says in (
            ({key: value for key, value in good.items() if key != name}, f"1 missing, as '{name}'"),
            ({**good, "adapter": torch.zeros(1)}, "1 unknown, as 'adapter'"),
            ({**good, name: torch.zeros(3, 3)}, "shape"),
        ):
            with pytest.raises(EngineError, match=says):
                await engine.publish(bad, 1)
        assert (await engine.generate(asked, SHORT)).ids == tiny.greedy(model, asked, 6)
        assert engine.version == 0


async def test_the_engine_does_not_follow_the_model_it_was_made_of() -> None:
    model = tiny.MAKE["qwen2"]().train(False)
    async with TorchEngine(model) as engine:
        before = await engine.generate(tiny.prompt(10), SHORT)
        torch.nn.init.zeros_(model.model.norm.weight)
        after = await engine.generate(tiny.prompt(10), SHORT)
        assert before.ids == after.ids
        await engine.publish(model.state_dict(), 1)
        told = await engine.generate(tiny.prompt(10), SHORT)
        assert told.logprobs == pytest.approx([-math.log(tiny.VOCABULARY)] * 6, abs=1e-5)


async def test_nothing_is_written_while_paused(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, found = Gate(monkeypatch, 5), []

    async def write() -> None:
        found.append(await engine.generate(tiny.prompt(10), Sampling(max_tokens=20, temperature=0)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await gate.reached.wait()
        tasks.start_soon(engine.pause)
        await anyio.wait_all_tasks_blocked()
        gate.open()
        await engine.pause()
        steps = len(gate.rows)
        tasks.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        assert (len(gate.rows), found) == (steps, [])
        await engine.resume()
    assert [written.ids for written in found] == [tiny.greedy(tiny.model(), tiny.prompt(10), 20)] * 2


async def test_abort_gives_each_what_it_has(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, found = Gate(monkeypatch, 8), {}

    async def write(key: str) -> None:
        found[key] = await engine.generate(tiny.prompt(10), LONG, key=key)

    async with anyio.create_task_group() as tasks:
        for key in ("one", "two", "three"):
            tasks.start_soon(write, key)
        await gate.reached.wait()
        tasks.start_soon(engine.abort, "two")
        await anyio.wait_all_tasks_blocked()
        gate.open()
        while "two" not in found:
            await anyio.wait_all_tasks_blocked()
        assert list(found) == ["two"]
        await engine.abort()
    again = await engine.generate([*tiny.prompt(10), *found["two"].ids], SHORT)
    assert again.cached >= 10 + len(found["two"].ids) - 1
    for written in found.values():
        assert written.stop == "abort"
        assert 0 < len(written.ids) < 500
        assert written.ids == tiny.greedy(tiny.model(), tiny.prompt(10), len(written.ids))


async def test_abort_reaches_those_who_wait_while_paused(engine: TorchEngine) -> None:
    await engine.pause()
    found: list[Written] = []

    async def write() -> None:
        found.append(await engine.generate(tiny.prompt(10), LONG))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        await engine.abort()
    assert found == [Written((), (), "abort", 0, 0, read=10)]


async def test_a_cancelled_request_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(60):
        async with TorchEngine(tiny.model(), rows=1) as engine:
            gate = Gate(monkeypatch, 5)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, tiny.prompt(10), LONG)
                await gate.reached.wait()
                tasks.cancel_scope.cancel()
            gate.open()
            written = await engine.generate(tiny.prompt(20), SHORT)
            assert written.ids == tiny.greedy(tiny.model(), tiny.prompt(20), 6)
            assert set(gate.rows) == {1}
            assert len(gate.rows) < 20


async def test_rows_that_leave_early_leave_the_others_right(engine: TorchEngine) -> None:
    lengths = [3, 40, 11, 25, 7, 33]
    found: dict[int, tuple[int, ...]] = {}

    async def write(index: int, length: int) -> None:
        sampling = Sampling(max_tokens=length, temperature=0)
        found[index] = (await engine.generate(tiny.prompt(12, seed=index), sampling)).ids

    async with anyio.create_task_group() as tasks:
        for index, length in enumerate(lengths):
            tasks.start_soon(write, index, length)
    for index, length in enumerate(lengths):
        assert found[index] == tiny.greedy(tiny.model(), tiny.prompt(12, seed=index), length)


async def test_the_event_loop_goes_on_while_a_step_runs(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, tiny.prompt(10), SHORT)
        await gate.reached.wait()
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        gate.open()


async def test_a_sibling_that_comes_late_still_waits_for_a_long_prompt_that_is_being_read(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "AT_ONCE", 32)
    gate, asked, found = Gate(monkeypatch, 1), tiny.prompt(120), []

    async def write() -> None:
        found.append(await engine.generate(asked, SHORT))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await gate.reached.wait()
        for _ in range(3):
            tasks.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert sorted(written.cached for written in found) == [0, *[len(asked) - 1] * 3]


def raises(error: Exception) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("a kernel broke"), "RuntimeError: a kernel broke"),
        (torch.OutOfMemoryError("20 GiB"), "lower the engine's `rows`"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "lower the engine's `rows`"),
    ],
)
async def test_a_step_that_fails_ends_its_rows_and_not_the_engine(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("trainer.engine.torch.dense.attend", raises(error))
        with pytest.raises(EngineError, match=says):
            await engine.generate(tiny.prompt(10), SHORT)
    assert (await engine.generate(tiny.prompt(10), SHORT)).ids == tiny.greedy(tiny.model(), tiny.prompt(10), 6)


@pytest.mark.parametrize("place", ["slab.Slab.reach", "slab.Slab.read", "tree.Tree.insert", "batch.sample"])
async def test_no_row_is_forgotten_wherever_memory_runs_out(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    failed = []

    async def write(seed: int) -> None:
        try:
            await engine.generate(tiny.prompt(10, seed=seed), SHORT)
        except EngineError as error:
            failed.append(str(error))

    with monkeypatch.context() as broken:
        broken.setattr(f"trainer.engine.torch.{place}", raises(MemoryError()))
        async with anyio.create_task_group() as tasks:
            for seed in (1, 2, 2):
                tasks.start_soon(write, seed)
    assert ["out of memory" in error for error in failed] == [True] * 3
    assert (await engine.generate(tiny.prompt(10), SHORT)).ids == tiny.greedy(tiny.model(), tiny.prompt(10), 6)


async def test_weights_that_went_wrong_are_named(engine: TorchEngine) -> None:
    good = tiny.model().state_dict()
    await engine.publish({name: tensor * torch.nan for name, tensor in good.items()}, 3)
    with pytest.raises(EngineError, match="not finite under version 3"):
        await engine.generate(tiny.prompt(10), SHORT)
    await engine.publish(good, 4)
    assert (await engine.generate(tiny.prompt(10), SHORT)).ids == tiny.greedy(tiny.model(), tiny.prompt(10), 6)


async def test_weights_that_were_wrong_and_never_sampled_leave_nothing_behind(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tiny.model().state_dict()
    await engine.publish({name: tensor * torch.nan for name, tensor in good.items()}, 1)
    gate = Gate(monkeypatch, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, tiny.prompt(550), SHORT)
        await gate.reached.wait()
        tasks.start_soon(engine.abort)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    await engine.publish(good, 2)
    assert (await engine.generate(tiny.prompt(10), SHORT)).ids == tiny.greedy(tiny.model(), tiny.prompt(10), 6)


async def test_leaving_ends_whoever_still_writes() -> None:
    found: list[str] = []

    async def write(engine: TorchEngine) -> None:
        try:
            await engine.generate(tiny.prompt(10), LONG)
        except EngineError as error:
            found.append(str(error))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks, TorchEngine(tiny.model()) as engine:
            await engine.pause()
            tasks.start_soon(write, engine)
            await anyio.wait_all_tasks_blocked()
    assert found == ["the engine was closed"]
    with pytest.raises(EngineError, match="not open"):
        await engine.generate(tiny.prompt(10), SHORT)


async def test_an_error_of_the_caller_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with TorchEngine(tiny.model()) as engine:
            await engine.generate(tiny.prompt(10), SHORT)
            raise KeyError


async def test_nothing_is_left_when_the_engine_is_gone() -> None:
    threads = threading.active_count()
    async with TorchEngine(tiny.model()) as engine:
        await engine.generate(tiny.prompt(10), SHORT)
        gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert threading.active_count() <= threads + 1  # the loop's own pool keeps its idle worker


async def test_images_are_refused(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="no images"):
        await engine.generate([1], SHORT, images=[Image(b"x", "image/png")])
