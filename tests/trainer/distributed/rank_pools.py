"""Ranks that stay alive for many cases, and training steps on random batches with any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import PreTrainedModel, Qwen3ForCausalLM

from tests.forked_python import ForkedPopen
from tests.trainer.policy.tiny_policies import plain_logprobs, tiny_model
from tests.trainer.vision.vision_models import picture
from tests.trainer.vision.vision_sequences import ledger_of
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import TrainBatch, TrainSequence
from trainer.distributed.connect_ranks import LocalRanks, connect_ranks
from trainer.distributed.lead import LeadPolicy, LeadUpdater
from trainer.distributed.rank_commands import END, LeaderChannel
from trainer.distributed.settings import DistributedSettings
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.vision.image_processor import ImageProcessor

TIMEOUT_S = 120.0


@contextmanager
def running_ranks(size: int, folder: Path, **settings: Any) -> Iterator[LeaderChannel]:
    """Other ranks as processes, which have imported torch and transformers already; this process is rank 0."""
    distributed = DistributedSettings(**{"ranks": size, "timeout_s": TIMEOUT_S, **settings})
    with ExitStack() as stack:
        with patch("gateway.process.spawn.Popen", ForkedPopen):
            local = stack.enter_context(LocalRanks(distributed, folder))
        ranks, names = connect_ranks(local.environment, distributed, local.listener, local.find_ended)
        channel = LeaderChannel(ranks, local.find_ended, names)
        stack.enter_context(ranks.watchdog.watching([], lambda: None))  # Sends heartbeats to the others.
        try:
            yield channel
            if not channel.is_broken:
                with channel.command(END):
                    pass
        finally:
            ranks.close()
            _clear_sharding_prop_cache()  # It names the groups of equal meshes, which end here: a process has one pool.


def make_updater(
    channel: LeaderChannel | None, model: Path, algorithm: AlgorithmSettings, update: UpdateSettings, exact: bool = True
) -> tuple[Policy, PolicyUpdater]:
    """A policy and its updater on all ranks, or in this process."""
    if channel is None:
        alone = Policy.load(model, update)
        return alone, PolicyUpdater(alone, algorithm, exact=exact)
    policy = LeadPolicy.lead(channel, model, update)
    return policy, LeadUpdater(policy, algorithm, exact=exact, temperature=1.0)


def save_wider_model(folder: Path) -> Path:
    """A model like the tiny one, with wider layers."""
    config = tiny_model(tie_word_embeddings=True).config
    config.intermediate_size = 48
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def random_batch(model: PreTrainedModel, seed: int, groups: int = 2, n: int = 3) -> TrainBatch:
    """Groups of different sizes and lengths, with rewards for outcomes and turns."""
    draw = Random(seed)
    sequences, owners, rewards = [], [], []
    for group in range(groups):
        opening = [draw.randrange(50) for _ in range(draw.randint(2, 12))]
        for _ in range(n + draw.randint(0, 2)):
            turns = [[draw.randrange(50) for _ in range(draw.randint(1, 6))] for _ in range(3)]
            ids = [*opening, *turns[0], *turns[1], *turns[2]]
            mask = [False] * len(opening) + [index != 1 for index, turn in enumerate(turns) for _ in turn]
            numbers = [-1] * len(opening) + [(0, -1, 1)[index] for index, turn in enumerate(turns) for _ in turn]
            known = plain_logprobs(model, ids).tolist()
            logprobs = [value if is_policy else 0.0 for value, is_policy in zip(known, mask, strict=True)]
            index = len(sequences)
            weights = [float(is_policy) for is_policy in mask]
            sequences.append(TrainSequence(f"{group}/{index}", index, ids, mask, logprobs, weights, numbers))
            owners.append(group)
            rewards.append(draw.random())
    names = tuple(sequence.name for sequence in sequences)
    scores = tuple((draw.random(), draw.random()) for _ in sequences)
    return TrainBatch(tuple(sequences), names, tuple(owners), tuple(rewards), scores, tuple(map(sum, scores)))


def image_batch(processor: ImageProcessor, seed: int, most: int = 2) -> TrainBatch:
    """Rows with `most` images, or fewer, or none, in two groups."""
    draw = Random(seed)
    sequences = []
    for index, count in enumerate((2, 0, 1, 0, 2)):
        shown = range(min(count, most))
        images = [picture(draw.randrange(3), 24 if draw.random() < 0.5 else 16) for _ in shown]
        ledger = ledger_of(processor, images, seed * 10 + index).expanded
        turns, turn = [], -1
        for position, is_policy in enumerate(ledger.mask):
            turn += is_policy and not ledger.mask[position - 1]
            turns.append(turn if is_policy else -1)
        row = ledger.ids, ledger.mask, ledger.logprobs, [float(own) for own in ledger.mask], turns
        sequences.append(TrainSequence(f"{index}", index, *row, media_spans=ledger.media_spans))
    scores = tuple((0.0,) * (max(sequence.turns) + 1) for sequence in sequences)
    names = tuple(sequence.name for sequence in sequences)
    return TrainBatch(tuple(sequences), names, (0, 0, 1, 1, 1), tuple(draw.random() for _ in names), scores)
