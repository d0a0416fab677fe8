"""The engine interface: an engine continues token ids, accepts new weights, and reports logprobs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from gateway.errors import OperatorError
from gateway.types import Image
from trainer.ledger import Experts, VersionRuns

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]
OnIds = Callable[[Sequence[int]], None]
"""Is called on the event loop with ids as soon as they are sampled, in order."""


FEWER_SEQUENCES = "lower `concurrency.running_requests` or `limits.rollout_tokens`"
"""What to do where an engine lacks memory."""
EXACT_TOLERANCE = 1e-4
"""Nats; smaller differences between logprobs are rounding."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. The defaults sample from the unmodified policy, which its gradient assumes."""

    max_tokens: int = 512
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the generation; the sampled one is part of it."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation, at the token that completes one."""
    banned_ids: tuple[int, ...] = ()
    """Ids that are never sampled, such as an image placeholder, for which the policy has no image."""
    seed: int | None = None
    """The same ids, weights and seed give the same generation, whatever else is in the batch."""
    experts_from: int | None = None
    """The first id whose experts are wanted, from an engine that tells them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request: sampled ids, each with its logprob at the time of sampling."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """After the temperature, before filters (top-p, top-k)."""
    finish_reason: FinishReason
    version: int = 0
    """The version of the weights that sampled the last id."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    earlier_versions: VersionRuns = ()
    """The versions that sampled the first ids, if weights changed during the generation."""
    prompt_tokens: int | None = None
    """Prompt tokens as the engine counts them, with images expanded."""
    experts: Experts | None = None
    """The experts of each token from `experts_from` on, but of the last."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The version that sampled each id."""
        earlier = tuple(chain.from_iterable((version,) * count for version, count in self.earlier_versions))
        return earlier + (self.version,) * (len(self.ids) - len(earlier))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do."""

    name: str
    is_exact: bool
    """Logprobs equal the trainer's for the same weights, up to float rounding."""
    supports_images: bool = False
    context_length: int = 0
    """The longest sequence in tokens; 0 if unlimited."""
    notes: tuple[str, ...] = ()
    """Surprises for the operator; printed and recorded with the run."""
    tells_experts: bool = False
    """Generations have the experts that their tokens were sent to, where these are asked for."""
    takes_adapters: bool = False
    """It has the model, and of weights with LoRA adapters takes these alone."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences between the engine's and the trainer's logprobs of the same ids under the same weights."""

    max_difference: float
    mean_difference: float

    @property
    def is_exact(self) -> bool:
        """True if the differences are rounding."""
        return self.max_difference <= EXACT_TOLERANCE

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of a step that published weights."""
        return {"agreement/max": self.max_difference, "agreement/mean": self.mean_difference}


class Buckets(Protocol):
    """Named weights in buckets. To take one may mean to gather it from other processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sequence[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What an engine has to know of LoRA adapters before it gets any."""

    rank: int
    alpha: float
    """They are scaled by alpha / rank."""
    modules: tuple[str, ...]
    """The layers that have adapters, by the last part of their names."""


class Adapters(dict[str, "torch.Tensor"]):
    """LoRA adapters alone, under their names in an adapter's file."""

    def __init__(self, shape: AdapterShape, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.shape = shape


class PolicyWeights(Mapping[str, "torch.Tensor"]):
    """A policy's weights whose tensors have to be made first: merged with adapters, or gathered from ranks."""

    gather_s: float = 0.0
    """Seconds that making them took so far."""

    @abstractmethod
    def adapters(self) -> Adapters | None:
        """The adapters alone, for an engine that has the rest; None if all weights are trained."""
        ...


class BucketedWeights(PolicyWeights):
    """Weights that are spread over several processes. Read as a mapping, they are gathered as a whole."""

    @abstractmethod
    def buckets(self, most: int) -> Buckets:
        """The weights under their names in a checkpoint's files, in buckets of at most `most` bytes, or of one tensor.
        None is gathered before it is taken, and none is kept."""
        ...

    @abstractmethod
    def keep(self) -> None:
        """Has all processes keep these weights, whatever is trained after that."""
        ...


def plan_buckets(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in buckets of at most `most` bytes, or of one tensor. A module's weights stay together if they fit: servers
    stack q, k and v, and SGLang up to 0.5.21 quantises a stack wrongly of which only a part comes."""
    plan: list[list[str]] = [[]]
    filled = 0
    for _, group in groupby(sizes, lambda name: name.rsplit(".", 2)[0]):
        names = list(group)
        for place, name in enumerate(names):
            needed = sizes[name] if place else sum(sizes[other] for other in names)
            if plan[-1] and filled + needed > most:
                plan.append([])
                filled = 0
            plan[-1].append(name)
            filled += sizes[name]
    return plan


NOT_FINITE = "logits are not finite"
"""In the message of an engine whose weights are broken: the same weights will fail again."""


class EngineError(OperatorError):
    """The engine failed, not the policy: the rollout ends with a stop reason of its own and is not scored."""


class ServersLostError(EngineError):
    """All servers of the engine are lost. Its exit code tells schedulers and `--restarts` that another try may do."""

    exit_code = 1


@runtime_checkable
class CountsTokens(Protocol):
    """An engine that says how far the generations under way are."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled so far, including those of generations under way."""
        ...


class Engine(Protocol):
    """An async context manager, entered by one task; any task may call `generate`. An engine without servers derives
    from it, and says nothing of them."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int:
        """The version of the current weights; -1 for servers that started with weights of their own."""
        ...

    @property
    def counters(self) -> Mapping[str, float]:
        """Events at the engine's servers since it was opened, by name; empty without servers."""
        return {}

    @property
    def published_bytes(self) -> int:
        """Bytes of weights that each server got at the latest publish; 0 without servers."""
        return 0

    @property
    def agreement(self) -> Agreement | None:
        """Agreement with the trainer at the latest publish; None for an engine that runs the trainer's own code."""
        return None

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        """Continues `ids`. `key` names the rollout, `group` its siblings. Cancelling the call frees its slot.

        `on_ids` is given what is sampled as it comes; an engine that cannot leaves it until the end.
        """
        ...

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Loads new weights. Generations under way continue with them, and report both versions; or, where a server
        has several versions at once, with those that they began with."""
        ...

    async def release_memory(self) -> bool:
        """Frees GPU memory for the trainer until the next `publish`, if so configured; returns whether it did.
        No generation may be under way."""
        return False
