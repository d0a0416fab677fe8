"""Logprobs and entropies of tokens from the hidden states before them, with logits of a slice of the vocabulary at a
time: an online logsumexp forward, and the slices' logits again backward. No copy of all logits exists in any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LOWEST = -1e30
"""Below every logit; minus infinity times 0 would be no number."""


def compute_head_logprobs(
    head: nn.Module, states_ND: Tensor, index_K: Tensor, ids_K: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """The logprob of each id, given the state that it follows, and the entropies of those distributions. As many logits
    are in memory at once as `chunk` states have."""
    weight_VD, bias_V = read_head(head, states_ND)
    width = len(weight_VD) if len(states_ND) <= chunk else max(1, len(weight_VD) * chunk // len(states_ND))
    result: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        states_ND, weight_VD, bias_V, index_K, ids_K, temperature, width
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
        logits_NS = _logits(states_ND, weight_VD, bias_V, part, temperature)
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
    ) -> tuple[Tensor, Tensor]:
        zeros_N = torch.zeros(len(states_ND), dtype=torch.float32, device=states_ND.device)
        top_N, total_N, weighted_N = zeros_N + LOWEST, zeros_N, zeros_N
        target_K = zeros_N[:1].expand(len(ids_K))
        for part in _slices(len(weight_VD), width):
            logits_NS = _logits(states_ND, weight_VD, bias_V, part, temperature)
            is_here_K, place_K = _find(ids_K, part)
            target_K = torch.where(is_here_K, logits_NS[index_K, place_K], target_K)
            before_N, top_N = top_N, torch.maximum(top_N, logits_NS.amax(-1))
            scale_N = (before_N - top_N).exp()
            shifted_NS = logits_NS.sub_(top_N[:, None])
            mass_NS = shifted_NS.exp()
            weighted_N = scale_N * (weighted_N + total_N * (before_N - top_N))
            weighted_N = weighted_N + torch.bmm(mass_NS[:, None], shifted_NS[:, :, None])[:, 0, 0]
            total_N = scale_N * total_N + mass_NS.sum(-1)
        norm_N = top_N + total_N.log()
        is_whole = width >= len(weight_VD)  # Then its probabilities are kept.
        kept = mass_NS.div_(total_N[:, None]) if is_whole and any(ctx.needs_input_grad) else None
        entropy_N = total_N.log() - weighted_N / total_N
        ctx.save_for_backward(states_ND, weight_VD, bias_V, index_K, ids_K, norm_N, entropy_N, kept)
        ctx.temperature, ctx.width = temperature, width
        ctx.set_materialize_grads(False)
        return target_K - norm_N[index_K], entropy_N[index_K]

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
            if kept is None:
                logits_NS = _logits(states_ND, weight_VD, bias_V, part, ctx.temperature)
                mass_NS = logits_NS.sub_(norm_N[:, None]).exp_()
            else:
                mass_NS = kept
            change_NS = mass_NS * -sum_N[:, None]
            if bonus_N is not None:
                change_NS -= bonus_N[:, None] * (torch.xlogy(mass_NS, mass_NS) + mass_NS * entropy_N[:, None])
            is_here_K, place_K = _find(ids_K, part)
            change_NS.index_put_((index_K, place_K), torch.where(is_here_K, gradient_K, 0), accumulate=True)
            change_NS = change_NS.to(states_ND.dtype)
            if states is not None:
                states += change_NS @ weight_VD[part]
            if weight is not None:
                torch.mm(change_NS.T, states_ND, out=weight[part])
            if bias is not None:
                torch.sum(change_NS, 0, out=bias[part])
        return None if states is None else states.to(states_ND.dtype), weight, bias, None, None, None, None


def _slices(size: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _logits(states_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, part: slice, temperature: float) -> Tensor:
    """A slice of the logits in float32, which belongs to the caller."""
    logits_NS = nn.functional.linear(states_ND, weight_VD[part], None if bias_V is None else bias_V[part]).float()
    return logits_NS if temperature == 1 else logits_NS.div_(temperature)


def _find(ids_K: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Whether each id is in a slice, and its place there; some place if it is not."""
    place_K = ids_K - part.start
    width = part.stop - part.start
    return (place_K >= 0) & (place_K < width), place_K.clamp(0, width - 1)
