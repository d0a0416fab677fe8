"""Logprobs and entropies of tokens from the hidden states before them, with logits of a slice of the vocabulary at a
time: an online logsumexp forward, and the slices' logits again backward. No copy of all logits exists in any dtype.

What is done with a slice beside the products of matrices are two plain functions. Compiled, each is a few kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LOWEST = -1e30
"""Below every logit; minus infinity times 0 would be no number."""


class SliceSums(NamedTuple):
    """What is known of each state's distribution after some slices of its logits."""

    top_N: Tensor
    """The highest logit."""
    total_N: Tensor
    """The sum of the logits' exponentials, less the highest."""
    weighted_N: Tensor
    """The same, each weighted by its logit, less the highest."""
    target_K: Tensor
    """The logits of tokens, as far as these are in the slices."""


def add_slice(  # noqa: PLR0913
    logits_NS: Tensor,
    top_N: Tensor,
    total_N: Tensor,
    weighted_N: Tensor,
    target_K: Tensor,
    index_K: Tensor,
    place_K: Tensor,
    temperature: float,
    keeps: bool,
) -> tuple[SliceSums, Tensor | None]:
    """Adds a slice to the sums; its logits may be overwritten. `place_K` are places of tokens, if they are in it.
    Also returns probabilities to keep for the backward pass, if there are no more slices."""
    logits_NS = _scale(logits_NS, temperature)
    is_here_K, place_K = _find(logits_NS, place_K)
    target_K = torch.where(is_here_K, logits_NS[index_K, place_K], target_K)
    before_N, top_N = top_N, torch.maximum(top_N, logits_NS.amax(-1))
    scale_N = (before_N - top_N).exp()
    shifted_NS = logits_NS.sub_(top_N[:, None])
    mass_NS = shifted_NS.exp()
    weighted_N = scale_N * (weighted_N + total_N * (before_N - top_N)) + shifted_NS.mul_(mass_NS).sum(-1)
    total_N = scale_N * total_N + mass_NS.sum(-1)
    return SliceSums(top_N, total_N, weighted_N, target_K), mass_NS.div_(total_N[:, None]) if keeps else None


def compute_change(  # noqa: PLR0913
    values_NS: Tensor,
    norm_N: Tensor | None,
    sum_N: Tensor,
    bonus_N: Tensor | None,
    entropy_N: Tensor,
    gradient_K: Tensor,
    index_K: Tensor,
    place_K: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a slice's logits, which may be overwritten; without a norm, values are kept probabilities.
    `sum_N` is the sum of gradients of a state's tokens, `bonus_N` the gradient of its entropy."""
    mass_NS = values_NS if norm_N is None else _scale(values_NS, temperature).sub_(norm_N[:, None]).exp_()
    change_NS = mass_NS * -sum_N[:, None]
    if bonus_N is not None:
        change_NS -= bonus_N[:, None] * (torch.xlogy(mass_NS, mass_NS) + mass_NS * entropy_N[:, None])
    is_here_K, place_K = _find(mass_NS, place_K)
    change_NS.index_put_((index_K, place_K), torch.where(is_here_K, gradient_K, 0), accumulate=True)
    return change_NS.to(dtype)


class SliceSteps(NamedTuple):
    """What is done with a slice of the logits, forward and backward."""

    add_slice: Callable[..., tuple[SliceSums, Tensor | None]] = add_slice
    compute_change: Callable[..., Tensor] = compute_change


PLAIN = SliceSteps()


def compile_steps() -> SliceSteps:
    """The same compiled, once for all sizes of two or more."""
    return SliceSteps(*(partial(_call_with_any_sizes, torch.compile(step, dynamic=True)) for step in PLAIN))


def _call_with_any_sizes(step: Callable[..., Any], *inputs: Any) -> Any:
    """Marks each size as one by itself: torch takes those that happen to be equal for one, and then compiles again."""
    for each in inputs:
        if isinstance(each, Tensor):
            torch._dynamo.maybe_mark_dynamic(each, list(range(each.dim())))
    return step(*inputs)


def compute_head_logprobs(  # noqa: PLR0913
    head: nn.Module,
    states_ND: Tensor,
    index_K: Tensor,
    ids_K: Tensor,
    temperature: float,
    chunk: int,
    steps: SliceSteps = PLAIN,
) -> tuple[Tensor, Tensor]:
    """The logprob of each id, given the state that it follows, and the entropies of those distributions. As many logits
    are in memory at once as `chunk` states have."""
    weight_VD, bias_V = read_head(head, states_ND)
    width = len(weight_VD) if len(states_ND) <= chunk else max(1, len(weight_VD) * chunk // len(states_ND))
    result: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        states_ND, weight_VD, bias_V, index_K, ids_K, temperature, width, steps
    )
    return result


@torch.no_grad()
def find_top_logprobs(
    head: nn.Module, states_ND: Tensor, top: int, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """The ids that most likely follow each state, with their logprobs; all of them if `top` is as large as that."""
    weight_VD, bias_V = read_head(head, states_ND)
    width = max(1, len(weight_VD) * chunk // max(chunk, len(states_ND)))
    logits_NK = torch.empty(len(states_ND), 0, device=states_ND.device)
    ids_NK, norm_N = logits_NK.long(), torch.full_like(logits_NK.sum(-1), LOWEST)
    for part in _slices(len(weight_VD), width):
        logits_NS = _scale(_logits(states_ND, weight_VD, bias_V, part), temperature)
        norm_N = torch.logaddexp(norm_N, logits_NS.logsumexp(-1))
        best_NK, place_NK = logits_NS.topk(min(top, logits_NS.shape[1]))
        logits_NK, ids_NK = torch.cat([logits_NK, best_NK], 1), torch.cat([ids_NK, place_NK + part.start], 1)
        logits_NK, place_NK = logits_NK.topk(min(top, logits_NK.shape[1]))
        ids_NK = ids_NK.gather(1, place_NK)
    return ids_NK, logits_NK - norm_N[:, None]


def read_head(head: nn.Module, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """The head's matrix and bias. One with adapters, or split over ranks, is told by what it makes of unit vectors."""
    if type(head) is nn.Linear and "forward" not in vars(head):
        return head.weight, head.bias
    unit_DD = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    bias_V = head(torch.zeros_like(unit_DD[:1]))[0]
    return (head(unit_DD) - bias_V).T, bias_V


class _HeadLogprobs(torch.autograd.Function):
    """Axes: state, vocabulary, width of a state, token, and slice of the vocabulary."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        index_K: Tensor,
        ids_K: Tensor,
        temperature: float,
        width: int,
        steps: SliceSteps,
    ) -> tuple[Tensor, Tensor]:
        zeros_N = torch.zeros(len(states_ND), dtype=torch.float32, device=states_ND.device)
        # One tensor for two of them would be compiled by itself.
        sums = SliceSums(zeros_N + LOWEST, zeros_N, zeros_N.clone(), zeros_N.new_zeros(len(ids_K)))
        keeps = width >= len(weight_VD) and any(ctx.needs_input_grad)
        for part in _slices(len(weight_VD), width):
            logits_NS = _logits(states_ND, weight_VD, bias_V, part)
            sums, kept = steps.add_slice(logits_NS, *sums, index_K, ids_K - part.start, temperature, keeps)
        norm_N = sums.top_N + sums.total_N.log()
        entropy_N = sums.total_N.log() - sums.weighted_N / sums.total_N
        ctx.save_for_backward(states_ND, weight_VD, bias_V, index_K, ids_K, norm_N, entropy_N, kept)
        ctx.temperature, ctx.width, ctx.steps = temperature, width, steps
        ctx.set_materialize_grads(False)
        return sums.target_K - norm_N[index_K], entropy_N[index_K]

    @staticmethod
    def backward(ctx: Any, gradient_K: Tensor | None, bonus_K: Tensor | None) -> tuple[Tensor | None, ...]:
        """`bonus_K` is the gradient of the entropy, where the loss has it."""
        states_ND, weight_VD, bias_V, index_K, ids_K, norm_N, entropy_N, kept = ctx.saved_tensors
        gradient_K = norm_N.new_zeros(len(ids_K)) if gradient_K is None else gradient_K / ctx.temperature
        bonus_N = None
        if bonus_K is not None:
            bonus_N = torch.zeros_like(norm_N).index_add_(0, index_K, bonus_K / ctx.temperature)
        sum_N = torch.zeros_like(norm_N).index_add_(0, index_K, gradient_K)
        states = torch.zeros_like(states_ND, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        weight = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        for part in _slices(len(weight_VD), ctx.width):
            change_NS = ctx.steps.compute_change(
                _logits(states_ND, weight_VD, bias_V, part) if kept is None else kept,
                norm_N if kept is None else None,
                sum_N,
                bonus_N,
                entropy_N,
                gradient_K,
                index_K,
                ids_K - part.start,
                ctx.temperature,
                states_ND.dtype,
            )
            if states is not None:
                states += change_NS @ weight_VD[part]
            if weight is not None:
                torch.mm(change_NS.T, states_ND, out=weight[part])
            if bias is not None:
                torch.sum(change_NS, 0, out=bias[part])
        return None if states is None else states.to(states_ND.dtype), weight, bias, None, None, None, None, None


def _slices(size: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _logits(states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, part: slice) -> Tensor:
    """A slice of the logits, which belongs to the caller."""
    return nn.functional.linear(states_ND, weight_VD[part], None if bias_V is None else bias_V[part])


def _scale(logits_NS: Tensor, temperature: float) -> Tensor:
    """Scaled logits in float32; eager, those that are in float32 are overwritten."""
    # Compiled, a copy costs nothing, and what an input is changed to would be written back.
    logits_NS = logits_NS.to(torch.float32, copy=torch.compiler.is_compiling())
    return logits_NS if temperature == 1 else logits_NS.div_(temperature)


def _find(slice_NS: Tensor, place_K: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each place is in a slice, and a place that is."""
    inner_K = place_K.clamp(0, slice_NS.shape[1] - 1)
    return inner_K == place_K, inner_K
