"""Turns that are streamed by servers: ids come as they are sampled, and the turn is the same as without a stream."""

from __future__ import annotations

import pytest

from tests.trainer.engine_sglang.engine_harness import opened
from tests.trainer.engine_sglang.fake_sglang import IDS, Fake, reads
from trainer.engine.base import EngineError, Sampling


@pytest.mark.parametrize("sends_new_only", [False, True])
async def test_ids_come_one_by_one_and_make_the_turn(sends_new_only: bool) -> None:
    fake, seen = Fake(sends_new_only=sends_new_only), []
    async with opened(fake) as engine:
        written = await engine.generate(IDS, Sampling(max_tokens=12), on_ids=lambda ids: seen.append(tuple(ids)))
    assert [len(ids) for ids in seen] == [1] * 12 and sum(seen, ()) == written.ids
    assert written.logprobs == pytest.approx(reads(fake.weights)((IDS[-1], *written.ids)), abs=1e-6)
    assert fake.bodies("/generate")[-1]["stream"] and "stream" not in fake.bodies("/generate")[0]


async def test_turn_whose_ids_were_seen_does_not_start_again() -> None:
    fake, seen = Fake(breaks_off=True), list[int]()
    async with opened(fake) as engine:
        before = len(fake.bodies("/generate"))
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.generate(IDS, Sampling(max_tokens=5), on_ids=seen.extend)
        assert len(seen) == 1 and len(fake.bodies("/generate")) == before + 1
