"""The policy's weights on all ranks, for an engine: gathered bucket by bucket, or as a whole if read as a mapping."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from trainer.distributed.rank_commands import LeaderChannel
from trainer.distributed.sharded_policy import ShardedPolicy
from trainer.engine.base import Adapters, BucketedWeights, plan_buckets

NamedTensor = tuple[str, Tensor]


class ShardedWeights(BucketedWeights):
    """The weights as they are now; once they are kept, as they were then, until others are."""

    def __init__(self, channel: LeaderChannel, policy: ShardedPolicy) -> None:
        self._channel, self._policy, self._is_kept = channel, policy, False
        self._names, self._sizes = policy.published_names, policy.untied_sizes

    def keep(self) -> None:
        with self._channel.command("keep_weights"):
            self._policy.keep_weights()
        self._is_kept = True

    def buckets(self, most: int) -> GatheredBuckets:
        return GatheredBuckets(self, plan_buckets(self._sizes, most))

    def gather(self, names: Sequence[str]) -> list[NamedTensor]:
        """Some of the weights, under their names in a checkpoint's files."""
        arguments = {"names": list(names), "kept": self._is_kept}
        with self._gathering("bucket", arguments):
            bucket = self._policy.gather_bucket(names, kept=self._is_kept)
        return list(self._policy.checkpoint_tensors(dict(bucket)).items())

    def adapters(self) -> Adapters | None:
        if self._policy.adapter_shape is None:
            return None
        with self._gathering("adapters"):
            return self._policy.gather_adapters()

    @contextmanager
    def _gathering(self, command: str, arguments: Mapping[str, object] | None = None) -> Iterator[None]:
        """Has the other ranks do their part, and measures how long it takes."""
        began = time.monotonic()
        # The engine that reads them may be in this mode, in which nothing can be gathered.
        with torch.inference_mode(False), self._channel.command(command, arguments):
            yield
        self.gather_s += time.monotonic() - began

    @cached_property
    def _whole(self) -> Mapping[str, Tensor]:
        with self._gathering("weights"):
            return self._policy.gather_weights()

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class GatheredBuckets:
    """Gathers each bucket when it is taken, and keeps none."""

    def __init__(self, weights: ShardedWeights, plan: Sequence[Sequence[str]]) -> None:
        self._weights, self._plan = weights, plan

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> list[NamedTensor]:
        return self._weights.gather(self._plan[index])
