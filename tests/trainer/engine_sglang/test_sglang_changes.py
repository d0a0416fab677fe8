"""Publishing changed values alone to servers that were started with our loader of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.trainer.engine_sglang.engine_harness import serving
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.waiting import wait_until
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.load_changes import (
    LOADER,
    PLACES,
    SENDER,
    find_changes,
    load_changes,
)
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference

INFO = {"custom_weight_loader": [LOADER], "dtype": "bfloat16"}
CHANGED, VECTOR = 6 * 3, 4 * 3
WHOLE = 2 * weights(0)[NAME].numel() + VECTOR


def steps() -> tuple[dict[str, torch.Tensor], ...]:
    """Float32 weights of two versions: all differ, and in bfloat16 three. A vector stays in float32 and changes."""
    first = weights(1)[NAME].bfloat16().float()
    first[5, 5] = 0.0
    second = first * (1 + 1e-6)
    second[3, 7], second[39, 0], second[5, 5] = 3.0, first[39, 0] * 1.01, -0.0
    return {NAME: first, "vector": torch.arange(3.0)}, {NAME: second, "vector": torch.arange(3.0) + 1}


def is_up_to_date(fake: Fake, given: dict[str, torch.Tensor], version: int) -> bool:
    sent = given[NAME].bfloat16()
    same = fake.weights[NAME].view(torch.int16).equal(sent.view(torch.int16))
    return same and fake.weights["vector"].equal(given["vector"]) and fake.version == str(version)


async def test_servers_get_changed_values_alone_and_have_the_weights_bit_by_bit() -> None:
    fakes, (first, second) = (Fake(info={**INFO, "tp_size": 2}), Fake("0.5.17", info=INFO)), steps()
    async with serving(*fakes) as urls, SGLangEngine(urls, TensorSync()) as engine:
        for version, given, size in ((1, first, WHOLE), (2, second, CHANGED + VECTOR), (3, first, CHANGED + VECTOR)):
            trained = {name: value.clone() for name, value in given.items()}
            await engine.publish(trained, version)
            assert engine.published_bytes == size and all(is_up_to_date(fake, given, version) for fake in fakes)
            trained[NAME] += 1  # As an update does, in place.
        await engine.publish(weights(9) | {"vector": second["vector"]}, 4)
        assert engine.published_bytes == WHOLE, "most has changed"


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_restarted_server_gets_whole_weights(is_noticed: bool) -> None:
    fake, other, (first, second) = Fake(info=INFO), Fake(info=INFO), steps()
    async with serving(fake, other) as urls, SGLangEngine(urls, TensorSync()) as engine:
        await engine.publish(first, 1)
        if is_noticed:
            fake.break_down()
            await engine.generate(IDS, Sampling(max_tokens=2))
            fake.start_anew()
            await wait_until(lambda: engine.replicas[0].up)
            assert is_up_to_date(fake, first, 1)
        else:
            fake.start_anew()
        await engine.publish(second, 2)
        assert engine.published_bytes == (CHANGED + VECTOR if is_noticed else WHOLE)
        assert len(fake.bodies("/update_weights_from_tensor")) == 2 + is_noticed, "none was refused"
        assert is_up_to_date(fake, second, 2) and is_up_to_date(other, second, 2)


@pytest.mark.parametrize("versions", [(1, 2, 3), (1, 1, 1)])
async def test_changes_are_never_found_from_weights_whose_publish_failed(versions: tuple[int, int, int]) -> None:
    fake, first = Fake(info={"custom_weight_loader": [LOADER]}), weights(1)
    second, expected = {NAME: first[NAME].clone()}, [first]
    second[NAME][3, 7] += 1
    reference = TrainerReference(lambda ids, _: reads(expected[0])(ids))
    async with serving(fake) as urls, SGLangEngine(urls, TensorSync(), reference=reference) as engine:
        await engine.publish(first, versions[0])
        expected[0] = weights(8)
        with pytest.raises(EngineError, match="has other weights than were published"):
            await engine.publish(second, versions[1])
        expected[0] = first
        await engine.publish(first, versions[2])
    assert fake.weights[NAME].equal(first[NAME])


async def test_server_that_is_lost_at_its_first_use_of_the_loader_gets_whole_weights_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake, other, (first, second) = Fake(info=INFO, dies_of_loader=True), Fake(info=INFO), steps()
    async with serving(fake, other) as urls, SGLangEngine(urls, TensorSync()) as engine:
        await engine.publish(first, 1)
        fake.start_anew()
        await wait_until(lambda: engine.replicas[0].up)
        await engine.publish(second, 2)
        assert engine.published_bytes == WHOLE
    assert is_up_to_date(fake, second, 2) and is_up_to_date(other, second, 2)
    assert sum("at its first weights for" in record.message for record in caplog.records) == 1
    assert LOADER not in {body["load_format"] for body in other.bodies("/update_weights_from_tensor")}


@pytest.mark.parametrize("infos", [({},), (INFO, {"dtype": "bfloat16"})])
async def test_servers_get_whole_weights_unless_all_have_the_loader(infos: tuple[dict[str, object], ...]) -> None:
    fakes, (first, second) = [Fake(info=info | {"dtype": "bfloat16"}) for info in infos], steps()
    async with serving(*fakes) as urls, SGLangEngine(urls, TensorSync()) as engine:
        for version, given in ((1, first), (2, second)):
            await engine.publish(given, version)
            assert engine.published_bytes == WHOLE and all(is_up_to_date(fake, given, version) for fake in fakes)


def test_changes_of_one_trainers_weights_are_not_made_in_anothers() -> None:
    (one, other), loaded = (torch.tensor(sender) for sender in (1, 2)), dict[str, torch.Tensor]()
    model = SimpleNamespace(load_weights=loaded.update)
    load_changes(model, [(SENDER, one), ("a", torch.zeros(3))])
    load_changes(model, [(SENDER, one), (f"{PLACES}a", torch.tensor([1])), ("a", torch.ones(1))])
    assert loaded["a"].tolist() == [0, 1, 0]
    load_changes(model, [(SENDER, other), ("a", torch.full((3,), 5.0))])
    with pytest.raises(KeyError):
        load_changes(model, [(SENDER, one), (f"{PLACES}a", torch.tensor([2])), ("a", torch.ones(1))])
    assert loaded["a"].tolist() == [5, 5, 5]


def test_changes_of_tensors_in_other_layouts_or_shapes() -> None:
    new, old = torch.randn(64, 8).t(), torch.randn(64, 8).t()
    old.copy_(new)
    new[2, 3] = float("nan")
    (places, where), (name, values) = find_changes([("a", new)], {"a": old})
    assert (places, where.tolist(), name) == (f"{PLACES}a", [2 * 64 + 3], "a") and values.isnan().all()
    assert [name for name, _ in find_changes([("a", new)], {"a": old.t()})] == ["a"]
