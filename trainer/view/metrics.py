"""The metrics of a training step: each name with its meaning, as the reference page lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

DESCRIPTIONS: Mapping[str, str] = {
    "step": "the training step; 0 is measured before training",
    "policy/version": "the policy version before the update: the number of updates so far",
    "reward/mean": "mean reward of the scored rollouts",
    "reward/std": "standard deviation of their rewards",
    "reward/failed": "rollouts that a reward function failed on; they are not trained on",
    "reward/{component}": "mean of one reward component, before its weight",
    "logged/{name}": "mean of what reward functions of `mtrl_plugins.trl.api` passed to `log_metric`",
    "success/sampled": "share of the scored rollouts that succeeded",
    "success/sampled/{kind}": "the same for one kind of task",
    "eval/greedy": "share of held-out tasks solved with greedy sampling",
    "eval/greedy/{kind}": "the same for one kind of task",
    "eval/sampled": "mean success of `evaluation.k` sampled tries of each held-out task",
    "eval/pass@k": "share of held-out tasks that one of so many sampled tries solves",
    "eval/pass^k": "share of held-out tasks that all of them solve",
    "eval/tasks": "held-out tasks that were scored",
    "eval/lost": "held-out tasks lost to infrastructure",
    "eval/lost_tries": "the same for sampled tries",
    "rollout/count": "scored rollouts",
    "rollout/lost": "rollouts without a score, through infrastructure or reward functions",
    "lost/{stop}": "rollouts that infrastructure ended, by stop reason",
    "rollout/lost_to/{tool}": "rollouts that ended because a call of this tool failed or took too long",
    "grade/planted": "rollouts whose policy had written a file of its reward itself, which the grader removed",
    "rollout/logprob": "mean logprob of the policy's tokens when they were sampled",
    "rollout/turns": "mean number of policy turns",
    "rollout/tokens": "mean length in tokens, prompt and tools included",
    "rollout/written": "mean number of tokens that the policy sampled",
    "rollout/calls": "mean number of tool calls",
    "rollout/truncated": "share of rollouts that a limit ended",
    "rollout/staleness": "mean age of the policy's tokens, in versions",
    "rollout/kind/{kind}": "share of the scored rollouts that are of one kind of task, if there are several",
    "rollout/unwritten": "rollouts in which the policy sampled no token",
    "tokens/sampled": "tokens that the policy sampled for the step, in all rollouts that ended",
    "tokens/trained": "those with a gradient; `tokens/sampled` is this plus all `tokens/left_out`",
    "tokens/left_out/infrastructure": "tokens of rollouts that infrastructure ended",
    "tokens/left_out/discarded": "tokens that no agent was given: the engine aborted the turn, or it was not recorded",
    "tokens/left_out/dropped_group": "tokens of rollouts whose group was dropped, since it lost others",
    "tokens/left_out/unscored": "tokens of rollouts that a reward function failed on",
    "tokens/left_out/replaced": "tokens of groups without a learning signal, which dynamic sampling replaced",
    "tokens/left_out/stale": "tokens of groups that were dropped as too old",
    "tokens/left_out/excluded": "tokens that a plug-in excluded from the loss",
    "tokens/left_out/credit_rounds": "tokens to which `algorithm.credit.trained_turns` gives no weight",
    "tokens/left_out/no_gradient": "tokens whose advantages are 0 in the whole row, as in a group with equal rewards",
    "agent/branches": "mean number of an agent's chats in a rollout: the main one, side calls and forks",
    "agent/retokenised": "prompts that did not begin with the ids as they were sampled; always 0",
    "agent/changed/{cause}": "messages that agents changed before they sent them back, by cause",
    "agent/requests/{problem}": "requests of agents that were refused, hung up, or asked for a call or a form",
    "stops/{stop}": "share of rollouts by stop reason",
    "groups/count": "groups in the batch",
    "groups/teaching": "groups whose rewards differ, so that they have an advantage other than 0",
    "tasks/learnable": "tasks tried so far that the policy solves at times, by its latest tries (a Beta posterior)",
    "tasks/solved": "tasks that it nearly always solves",
    "tasks/hopeless": "tasks that it nearly never solves",
    "tasks/wasted_tokens": "share of the step's sampled tokens whose groups taught nothing",
    "loss": "the loss of the last optimizer step",
    "entropy": "mean entropy of the policy at its trained tokens, in nats",
    "clipped": "share of trained tokens whose ratio was clipped",
    "kl/old": "KL divergence from the policy before the step, in nats per token",
    "kl/reference": "KL divergence from the reference model, in nats per token; with `algorithm.kl`",
    "critic/loss": "the critic's loss; with `algorithm.credit: gae`",
    "mismatch/mean": "mean absolute difference between the engine's and the trainer's logprobs, in nats",
    "mismatch/max": "the largest absolute difference between them",
    "mismatch/kl": "KL divergence between engine and trainer, in nats per token",
    "mismatch/factor": "mean importance weight of the mismatch correction",
    "mismatch/rejected": "share of trained tokens that the correction gave weight 0",
    "mismatch/pass_skipped": "1 where old logprobs needed no forward pass of their own",
    "agreement/mean": "mean absolute difference of servers' and trainer's logprobs of the probes, after publishing",
    "agreement/max": "the largest absolute difference between them",
    "staleness/max": "the largest age of a trained token, in versions",
    "staleness/dropped": "groups dropped as too old",
    "staleness/kl": "KL divergence between the weights that sampled the tokens and those before the step",
    "staleness/age_{age}": "share of trained tokens by age in versions",
    "update/rows": "rows of the batch with a gradient",
    "distributed/imbalance": "with several ranks: the busiest one's tokens to compute, as a multiple of the mean",
    "distributed/busy_s/{rank}": "seconds that a rank computed decoder layers in forward passes, without its waits",
    "distributed/idle/{rank}": "1 minus that, as a share of the busiest rank's: how long it waits for that one",
    "distributed/tokens_per_s/{rank}": "tokens of the rank's rows by these seconds; the alarm for stragglers reads it",
    "distributed/restarts": "with several ranks: how often all of them were started again since the step before",
    "update/idle": "rows without a gradient, which are not computed",
    "update/tokens": "tokens with a gradient",
    "update/grad_norm": "norm of the gradient before clipping",
    "update/lr": "learning rate of the step",
    "idle/trainer": "share of the step in which nothing was trained, since rollouts were not there yet",
    "idle/engine": "share of the step in which no rollout was generating",
    "engine/waiting_s": "seconds that training waited for rollouts",
    "workers/alive": "rollout workers that are up",
    "workers/restarts": "rollout workers of the run that were started again during the step, here or by their launcher",
    "workers/idle/{worker}": "share of the step in which none of a worker's rollouts was in its hands",
    "workers/turn_s/{worker}": "mean seconds from the engine's answer to a rollout's next request or its end",
    "workers/lost_rollouts": "rollouts lost with their worker during the step, with those that began again",
    "engine/servers_lost": "SGLang servers lost during the step",
    "engine/restarts": "SGLang servers that came back during the step after they were lost, whoever started them again",
    "engine/routes/{reason}": "requests by routing reason (placed, kept, crowded, lost), and by server",
    "engine/rollouts/ended": "rollouts that ended during the step",
    "engine/rollouts/refilled": "rollouts that replaced failed ones",
    "engine/turns/count": "turns generated",
    "engine/tokens/written": "tokens generated",
    "engine/tokens/written_per_s": "tokens generated per second",
    "engine/tokens/asked": "input tokens of all requests",
    "engine/tokens/possible": "input tokens that could have been cached: the rollout or a sibling sent them before",
    "engine/tokens/cached": "input tokens that came from the prefix cache",
    "engine/tokens/cached_of_possible": "share of possible tokens that were cached",
    "engine/tokens/cached_of_possible_turn_{turn}": "the same by turn of the rollout",
    "engine/tokens/cached_of_possible_worst_group": "the same in the worst group",
    "engine/outcomes/{outcome}": "tool calls by outcome",
    "engine/stops/{stop}": "ended rollouts by stop reason",
    "engine/drift/{cause}": "differences between the ledger and the template's own rendering, by cause",
    "engine/loop_blocked_seconds": "the longest time in which the event loop was held, so that no tool was answered",
    "engine/tools/{tool}/count": "calls of a tool",
    "engine/tools/{tool}/{outcome}": "calls of a tool by outcome",
    "time/tools/{tool}/p50_s": "median duration of a tool's calls",
    "time/tools/{tool}/p95_s": "95th percentile of the durations",
    "time/tools/{tool}/max_s": "the longest duration",
    "time/rewards/{component}/mean_s": "mean time that a reward component took to score a group",
    "time/rewards/{component}/max_s": "the longest time that it took",
    "time/publish/gather_s": "seconds of publishing in which ranks gathered the weights, or adapters were merged",
    "time/publish/transfer_s": "seconds of publishing in which engines took the weights, and were compared with them",
    "publish/megabytes": "megabytes of weights that each server got: all of them, or LoRA adapters alone",
    "time/{phase}_s": "seconds that a phase of the step took",
}
"""By name; a part in braces stands for a value of its own. The first name that fits counts."""

NOT_REPEATED = (
    "time/",
    "idle/",
    "distributed/busy_s/",
    "distributed/idle/",
    "distributed/tokens_per_s/",
    "workers/idle/",
    "workers/turn_s/",
    "engine/waiting_s",
    "engine/loop_blocked_seconds",
    "engine/servers_lost",
    "engine/restarts",
    "distributed/restarts",
    "engine/routes/",
    "engine/rollouts/refilled",
    "engine/tokens/written_per_s",
    "engine/tokens/cached",
    "engine/tokens/possible",
)
"""Beginnings of the names whose values depend on the machine: durations, and what of a prefix cache was still there.

All others are the same to the bit in a run that was stopped and resumed, in synchronous mode on the embedded engine.
A cache starts empty after `--resume`, where that of an undisturbed run still holds the prompts of an evaluation.
"""


def is_repeated(name: str) -> bool:
    """Whether a resumed run measures the same values of a metric as one that was never stopped."""
    return not name.startswith(NOT_REPEATED)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    parts = {name: re.split(r"\{\w+\}", name) for name in DESCRIPTIONS}
    return tuple((re.compile(".+".join(map(re.escape, parts[name]))), name) for name in sorted(parts, key=_wildcards))


def _wildcards(name: str) -> int:
    return name.count("{")


def describe_metric(name: str) -> str | None:
    """The description of a metric, or None for an unknown one."""
    return next((DESCRIPTIONS[known] for pattern, known in _patterns() if pattern.fullmatch(name)), None)
