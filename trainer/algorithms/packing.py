"""Packs sequences end to end into a batch without padding, and sums over its segments.

Two rollouts of one group, `q q a` with reward 1 and `q q b b` with reward 0, where the task wrote `q`:

    ids_T              q   q   a   q   q   b   b
    sequence_T         0   0   0   1   1   1   1
    mask_T             -   -   x   -   -   x   x      the policy wrote it
    weights_T          0   0   1   0   0   1   1      how much it counts; more than 0 only where the mask is set
    advantages_T       0   0  .7   0   0 -.7 -.7
    engine_logprobs_T  0   0 -.4   0   0 -.2 -.9      the logprob of this very token, when it was sampled
    group_S            0           0

All `_T` tensors line up: the logprob at t is that of `ids_T[t]` given what stands before it in its own sequence, so the
model's output at t - 1 is scored at t. The first token of a sequence has nothing before it, and no policy wrote it.

A number that is not finite is reported with its rollout before it can reach the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gateway.errors import OperatorError
from gateway.types import Image
from trainer.ledger import Experts, MediaSpan, no_experts


def sum_by_segment(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Sums the values of each segment."""
    return values_N.new_zeros(segments).index_add(0, segment_N, values_N)


def count_by_segment(segment_N: Tensor, segments: int) -> Tensor:
    """Counts the elements of each segment."""
    return torch.bincount(segment_N, minlength=segments)


def token_positions(sequence_N: Tensor) -> Tensor:
    """Each element's position in its own sequence, from 0; sequences lie end to end."""
    index_N = torch.arange(len(sequence_N), device=sequence_N.device)
    is_first_N = torch.ones_like(sequence_N, dtype=torch.bool)
    is_first_N[1:] = sequence_N.diff() != 0
    return index_N - torch.where(is_first_N, index_N, 0).cummax(0).values


def number_segments(names_N: Tensor) -> tuple[Tensor, int]:
    """Replaces any integers by segments counted from 0, and counts these."""
    segment_N = torch.unique(names_N, return_inverse=True)[1]
    return segment_N, int(segment_N.max()) + 1 if len(segment_N) else 0


def segment_varies(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Whether each element's segment has two different values. Compares the values, since means are rounded."""
    high = values_N.new_full((segments,), -torch.inf).scatter_reduce(0, segment_N, values_N, "amax")
    low = values_N.new_full((segments,), torch.inf).scatter_reduce(0, segment_N, values_N, "amin")
    return (high > low)[segment_N]


def sum_to_go(values_N: Tensor, sequence_N: Tensor, discount: float = 1.0) -> Tensor:
    """Sums each element's own value and all that follow in its sequence, discounted once more per position."""
    if not len(values_N):
        return values_N
    position_N = token_positions(sequence_N)
    # In a table of sequence by position, one step of the loop serves all sequences.
    table_SP = values_N.new_zeros(int(sequence_N.max()) + 1, int(position_N.max()) + 1)
    table_SP[sequence_N, position_N] = values_N
    to_go_S = table_SP.new_zeros(len(table_SP))
    for position in reversed(range(table_SP.shape[1])):
        to_go_S = table_SP[:, position] + discount * to_go_S
        table_SP[:, position] = to_go_S
    return table_SP[sequence_N, position_N]


REMEDY = "start again with a lower `update.lr`; `--model RUN/checkpoints/STEP` starts from weights that were still fine"


class NotFiniteError(OperatorError):
    """NaN or infinity where a number is needed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}\n  remedy: {REMEDY}")


def check_rollouts_finite(what: str, values_S: Tensor, names_S: Sequence[str]) -> None:
    """Raises NotFiniteError with the first rollout whose value is not finite."""
    wrong_S = ~values_S.isfinite()
    if bool(wrong_S.any()):
        first = int(wrong_S.nonzero()[0])
        raise NotFiniteError(f"rollout {names_S[first]} has {what} {float(values_S[first])}; a number is needed")


CHECKED_TENSORS = {
    "weights_T": "a weight of",
    "advantages_T": "an advantage of",
    "engine_logprobs_T": "an engine logprob of",
    "old_logprobs_T": "an old logprob of",
    "ref_logprobs_T": "a reference logprob of",
}
"""Tensors of a batch that must be finite where the policy wrote, with their names for error messages."""


def move_tensor(values: Tensor, device: torch.device | str) -> Tensor:
    """The values on a device. A GPU reads them from pinned memory, so that neither side waits for the copy. Not
    measured on a GPU yet."""
    if torch.device(device).type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One ledger with its token advantages. A rollout of several ledgers has several rows."""

    name: str
    """The rollout's name in error messages."""
    ids: Sequence[int]
    mask: Sequence[bool]
    engine_logprobs: Sequence[float]
    """The logprobs at sampling; 0.0 where nothing was sampled."""
    advantages: Sequence[float]
    weights: Sequence[float]
    group: int = 0
    stale: Sequence[bool] = ()
    """The tokens that were sampled by older weights than those being trained; empty if there are none."""
    media_spans: Sequence[MediaSpan] = ()
    """Where images stand among the ids, as wide as the model sees them."""
    rollout_weight: float | None = None
    """The weights of all trained tokens of its rollout; by default those of this row, the rollout's only one."""
    experts: Experts = field(default_factory=no_experts)
    """The experts that the engine sent each token to, one token after the other; empty if it did not tell them."""


class TopLogprobs(NamedTuple):
    """The reference's most likely tokens at each trained token, which it has if it follows the same ids."""

    ids_TK: Tensor
    logprobs_TK: Tensor
    """Minus infinity for what is no token of the policy."""


@dataclass(frozen=True)
class Batch:
    """Packed rows: the inputs of the loss that do not change between optimizer steps."""

    ids_T: Tensor
    mask_T: Tensor
    weights_T: Tensor
    advantages_T: Tensor
    engine_logprobs_T: Tensor
    old_logprobs_T: Tensor
    """The trainer's logprobs under the weights that sampled. The engine's own, if those are known to be exact, and for
    stale tokens, whose weights are gone."""
    sequence_T: Tensor
    group_S: Tensor
    names_S: tuple[str, ...]
    ref_logprobs_T: Tensor | None = None
    """The reference policy's logprobs, if a KL term needs them."""
    ref_top: TopLogprobs | None = None
    """Or its most likely tokens, if the KL is computed over those."""
    stale_T: Tensor | None = None
    """Tokens that were sampled by older weights than those being trained; None if there are none."""
    rollout_weight_S: Tensor | None = None
    """The weights of the trained tokens of each sequence's rollout; None if each sequence is a rollout of its own."""
    images: tuple[Image, ...] = ()
    """The images, each once. An id below 0 is a position in one of them: -1 is the first of the first image."""
    experts_TX: Tensor | None = None
    """The experts that the engine sent each token to, layer by layer; -1 where it did not tell them."""
    trained_K: Tensor = field(init=False)
    """Where the trained tokens are, so that a GPU need not be asked how many there are."""
    fresh_K: Tensor = field(init=False)
    """Those that were sampled by the weights being trained."""

    def __post_init__(self) -> None:
        tokens = {name: values for name, values in vars(self).items() if name.endswith("_T") and values is not None}
        sizes = {name: tuple(values.shape) for name, values in tokens.items()}
        if set(sizes.values()) != {(len(self.ids_T),)}:
            raise ValueError(f"the token tensors of a batch differ in shape: {sizes}")
        if len(self.names_S) != self.sequence_count or tuple(self.group_S.shape) != (self.sequence_count,):
            raise ValueError(f"{self.sequence_count} names for groups of shape {tuple(self.group_S.shape)}")
        if self.mask_T.dtype != torch.bool:
            raise ValueError(f"the mask must be boolean, and is {self.mask_T.dtype}")
        sizes_S = count_by_segment(self.sequence_T, self.sequence_count)
        if len(sizes_S) > self.sequence_count or bool((sizes_S == 0).any()) or bool((self.sequence_T.diff() < 0).any()):
            raise ValueError("sequences must lie end to end in order, and each must have a token")
        for name, what in CHECKED_TENSORS.items():
            if name in tokens:
                self.check_finite(what, tokens[name], self.mask_T)
        self._check_trained_tokens()
        vars(self).update(trained_K=self.trained_T.nonzero()[:, 0], fresh_K=self.fresh_T.nonzero()[:, 0])

    def _check_trained_tokens(self) -> None:
        """Checks that trained tokens were written by the policy, and are not first in their sequence."""
        if (unwritten := (self.weights_T != 0) & ~self.mask_T).any():
            raise ValueError(f"{self.describe_token(unwritten)} has a weight, but the policy did not write it")
        if (negative := self.weights_T < 0).any():
            raise ValueError(f"{self.describe_token(negative)} has a negative weight")
        if (first := self.mask_T & (token_positions(self.sequence_T) == 0)).any():
            raise ValueError(f"{self.describe_token(first)} is masked as the policy's, but is first in its sequence")

    def to(self, device: torch.device | str) -> Batch:
        tensors = {name: values for name, values in vars(self).items() if torch.is_tensor(values)}
        return self._change({name: move_tensor(values, device) for name, values in tensors.items()})

    def _change(self, changes: Mapping[str, Any]) -> Batch:
        """A copy that is not checked again: each check makes Python wait for a GPU (see `check_trained_finite`)."""
        changed = copy(self)
        vars(changed).update(changes)
        return changed

    @property
    def sequence_count(self) -> int:
        return len(self.names_S)

    @property
    def trained_T(self) -> Tensor:
        """The tokens in the loss: those with a weight. Tokens of tools and tasks have none."""
        return self.weights_T > 0

    @property
    def fresh_T(self) -> Tensor:
        """The trained tokens that were sampled by the weights being trained."""
        return self.trained_T if self.stale_T is None else self.trained_T & ~self.stale_T

    def with_old_logprobs(self, trainer_logprobs_T: Tensor, proximal: bool = False) -> Batch:
        """A copy with the trainer's logprobs from before the step as the old policy's. Stale tokens keep the engine's,
        unless the ratio is to the proximal policy: `mismatch` then weighs the difference."""
        if self.stale_T is not None and not proximal:
            trainer_logprobs_T = torch.where(self.stale_T, self.engine_logprobs_T, trainer_logprobs_T)
        return self._add("old_logprobs_T", trainer_logprobs_T)

    def with_ref_logprobs(self, ref_logprobs_T: Tensor) -> Batch:
        """A copy with the reference policy's logprobs."""
        return self._add("ref_logprobs_T", ref_logprobs_T)

    def with_ref_top(self, top: TopLogprobs) -> Batch:
        """A copy with the reference policy's most likely tokens."""
        return self._change({"ref_top": top})

    def _add(self, name: str, values_T: Tensor) -> Batch:
        if values_T.shape != self.ids_T.shape:
            raise ValueError(f"{len(self.ids_T)} tokens with {name} of shape {tuple(values_T.shape)}")
        return self._change({name: values_T})

    def sum_by_sequence(self, values_T: Tensor) -> Tensor:
        return sum_by_segment(values_T, self.sequence_T, self.sequence_count)

    def mean_by_sequence(self, values_T: Tensor, selected_T: Tensor) -> Tensor:
        """The mean over each sequence's selected tokens; 0 for a sequence without any."""
        sum_S = self.sum_by_sequence(torch.where(selected_T, values_T, 0))
        return sum_S / self.sum_by_sequence(selected_T.to(values_T.dtype)).clamp(min=1)

    def check_finite(self, what: str, values_T: Tensor, selected_T: Tensor) -> None:
        """Raises NotFiniteError with the first selected token whose value is not finite, and its rollout."""
        if (wrong := selected_T & ~values_T.isfinite()).any():
            value = float(values_T[wrong][0])
            raise NotFiniteError(
                f"{self.describe_token(wrong)} has {what} {value}; exclude its rollout, or look into it"
            )

    def describe_token(self, selected_T: Tensor) -> str:
        """Describes the first selected token for an error message."""
        token = int(selected_T.nonzero()[0])
        position = int(token_positions(self.sequence_T)[token])
        return f"rollout {self.names_S[int(self.sequence_T[token])]}: token {position} (id {int(self.ids_T[token])})"


def check_trained_finite(batches: Sequence[Batch], name: str) -> None:
    """Raises NotFiniteError with the first trained token whose value is not finite. Waits for a GPU once."""
    values = [getattr(batch, name)[batch.trained_K] for batch in batches]
    if not bool(torch.cat(values).isfinite().all()):
        for batch in batches:
            batch.check_finite(CHECKED_TENSORS[name], getattr(batch, name), batch.trained_T)


def pack(rows: Sequence[BatchRow]) -> Batch:
    """Packs rows end to end. The engine's logprobs serve as the old policy's until they are replaced."""
    for row in rows:
        sizes = {name: len(getattr(row, name)) for name in ("ids", "mask", "engine_logprobs", "advantages", "weights")}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"rollout {row.name}: its token lists differ in length: {sizes}")

    def floats(name: str) -> Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=torch.float32)

    engine_logprobs_T = floats("engine_logprobs")
    ids, images = number_image_tokens(rows)
    stale = [is_stale for row in rows for is_stale in row.stale or (False,) * len(row.ids)]
    return Batch(
        ids_T=torch.tensor(ids, dtype=torch.long),
        mask_T=torch.tensor([is_written for row in rows for is_written in row.mask], dtype=torch.bool),
        weights_T=floats("weights"),
        advantages_T=floats("advantages"),
        engine_logprobs_T=engine_logprobs_T,
        old_logprobs_T=engine_logprobs_T,
        sequence_T=torch.tensor([index for index, row in enumerate(rows) for _ in row.ids], dtype=torch.long),
        group_S=torch.tensor([row.group for row in rows], dtype=torch.long),
        names_S=tuple(row.name for row in rows),
        stale_T=torch.tensor(stale, dtype=torch.bool) if any(stale) else None,
        rollout_weight_S=_pack_rollout_weights(rows),
        images=images,
        experts_TX=_pack_experts(rows),
    )


def _pack_experts(rows: Sequence[BatchRow]) -> Tensor | None:
    width = max((len(row.experts) // len(row.ids) for row in rows), default=0)
    if not width:
        return None
    experts_TX = torch.full((sum(len(row.ids) for row in rows), width), -1, dtype=torch.int16)
    start = 0
    for row in rows:
        if row.experts:
            experts_TX[start : start + len(row.ids)] = torch.frombuffer(row.experts, dtype=torch.int16).view(-1, width)
        start += len(row.ids)
    return experts_TX


def _pack_rollout_weights(rows: Sequence[BatchRow]) -> Tensor | None:
    if all(row.rollout_weight is None for row in rows):
        return None
    weights = [sum(row.weights) if row.rollout_weight is None else row.rollout_weight for row in rows]
    return torch.tensor(weights, dtype=torch.float32)


def number_image_tokens(rows: Sequence[BatchRow]) -> tuple[list[int], tuple[Image, ...]]:
    """The rows' ids, with image tokens replaced by negative ids counted down over all images.

    The same position in the same image gets the same id in every row; another image gets other ids.
    """
    ids: list[int] = []
    ids_of: dict[Image, range] = {}
    next_id = -1
    for row in rows:
        row_start = len(ids)
        ids += row.ids
        for span in row.media_spans:
            if isinstance(span.medium, Image):
                if span.medium not in ids_of:
                    ids_of[span.medium] = range(next_id, next_id - span.stop + span.start, -1)
                    next_id -= span.stop - span.start
                ids[row_start + span.start : row_start + span.stop] = ids_of[span.medium]
    return ids, tuple(ids_of)
