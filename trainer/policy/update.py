"""Makes a training step: advantages, old logprobs, loss and gradient over micro-batches, optimizer and critic steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from itertools import accumulate, islice, pairwise, zip_longest
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.algorithms.advantages import TokenAdvantages, build_row, compute_token_advantages
from trainer.algorithms.loss import (
    Loss,
    Mismatch,
    compute_loss,
    estimate_kl,
    measure_mismatch,
    merge_mismatches,
    read_losses,
)
from trainer.algorithms.named_algorithms import ALGORITHMS
from trainer.algorithms.packing import Batch, BatchRow, TopLogprobs, check_trained_finite, move_tensor
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import TrainBatch
from trainer.engine.torch.threads import choose_threads, use_threads
from trainer.policy.logprobs import LogprobSource, PackedTokens, PassPlan, Reference, decoder_layers_of
from trainer.policy.memory_plan import is_out_of_memory, suggest_remedy
from trainer.policy.microbatch import DealtRows, MetricMeans, deal_batches, split_evenly
from trainer.policy.policy import Policy
from trainer.policy.process_memory import trim_heap
from trainer.policy.ranks import measure_ranks
from trainer.policy.settings import Checkpointing, PolicyError

if TYPE_CHECKING:
    from trainer.policy.critic import Critic


@torch.no_grad()
def recompute_logprobs(
    batch: Batch, source: LogprobSource, temperature: float, plan: PassPlan | None = None
) -> torch.Tensor:
    """Computes the logprobs of the trained tokens under the reference, or under the policy before the step."""
    return source.compute_batch_logprobs(trained_tokens(batch, temperature), plan).logprobs_T


def trained_tokens(batch: Batch, temperature: float) -> PackedTokens:
    """The batch's tokens, of which those that are trained are selected."""
    return PackedTokens(batch.ids_T, batch.sequence_T, batch.trained_T, temperature, batch.images)


BACKWARD = 2
"""The cost of a layer's backward pass as a multiple of its forward pass, without what is computed again."""


def _count_parameters(module: Any) -> int:
    return sum(value.numel() for value in module.parameters())


class PassProgress:
    """Follows passes of a model, of which a large one takes minutes on a CPU."""

    def __init__(self, model: Any, *, checkpointing: Checkpointing) -> None:
        self._layers = decoder_layers_of(model)
        layer = _count_parameters(self._layers[0]) if self._layers else 1
        head = _count_parameters(model.get_output_embeddings())
        again = float(checkpointing is True)
        if checkpointing == "feed_forward":
            again = _count_parameters(self._layers[0].mlp) / layer
        self._backward_cost = BACKWARD + again
        self._head_cost: float = (1 + BACKWARD) * head / layer
        self._forward = self._backward = 0

    @property
    def share(self) -> float:
        """The share of the pass that is done, from 0 to 1."""
        done: float = self._forward
        if self._backward:  # The first gradient is that of the head's input.
            done += self._head_cost + self._backward_cost * (self._backward - 1)
        return done / (len(self._layers) * (1 + self._backward_cost) + self._head_cost)

    @contextmanager
    def follow(self, on_share: Callable[[float], None]) -> Iterator[None]:
        """Calls the function with the share that is done, after each layer of a pass that is made meanwhile."""
        self._forward = self._backward = 0

        def on_gradient(gradient: Tensor) -> None:
            self._backward += 1
            on_share(self.share)

        def on_output(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if self._backward or not hidden.requires_grad:  # Gradient checkpointing computes it again.
                return
            self._forward += 1
            hidden.register_hook(on_gradient)
            on_share(self.share)

        handles = [layer.register_forward_hook(on_output) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


COEFFICIENT, LAST_ENTROPY = "entropy_coefficient", "last_entropy"
MAX_EXACT_MISMATCH = 1e-4
"""In nats. If no token of a sample is further off, the engine's logprobs are used as the old policy's."""


OnPass = Callable[[float, int, int], None]
"""Takes how many micro-batches of an update were passed, how many there are, and the tokens of those that were. A
micro-batch that is being passed counts with the share of its layers that is done."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that are in memory together, and the critic's targets for their tokens."""

    batch: Batch
    on_host: Batch
    """The same before it was moved to the model's device; old and reference logprobs are not in it."""
    indexes: tuple[int, ...]
    """Which of the rows it has; none if it only keeps this rank in step with the others."""
    start_plan: Callable[[], Future[PassPlan | None]]
    """Has the plan of its passes made in a thread, once."""
    returns_T: Tensor | None = None


def plan_ahead(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, PassPlan | None]]:
    """Each micro-batch with the plan of its passes, which is made during the pass before, unless an earlier pass over
    it had one."""
    for micro_batch, following in zip_longest(micro_batches, micro_batches[1:]):
        plan = micro_batch.start_plan()
        if following:
            following.start_plan()
        yield micro_batch, plan.result()


def _without_experts(plan: PassPlan | None) -> PassPlan | None:
    """The plan for another model than the policy, whose routers choose by themselves."""
    return plan and replace(plan, experts_UX=None)


class PolicyUpdater:
    """Updates the policy, and a critic if there is one, from train batches."""

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSettings,
        *,
        exact: bool,
        reference: Reference | None = None,
        temperature: float = 1.0,
        deterministic: bool | None = None,
    ) -> None:
        """`exact`: whether the engine claims exact logprobs; `temperature`: what it samples with."""
        if algorithm.credit.kind == "gae" and policy.critic is None:
            raise PolicyError("`algorithm.credit.kind: gae` needs a critic", "add `update.critic: {}`")
        if not temperature:
            raise PolicyError("training needs sampling at a temperature above 0", "raise `sampling.temperature`")
        self._policy, self._algorithm, self._exact, self._temperature = policy, algorithm, exact, temperature
        self._reference = reference if algorithm.kl.coefficient else None
        if algorithm.kl.coefficient and reference is None:
            from trainer.policy.reference import open_reference

            self._reference = open_reference(policy, algorithm.kl)
        self._critic: Critic | None = policy.critic if algorithm.credit.kind == "gae" else None
        self._ranks = policy.ranks
        self._proximal = algorithm.ratio == "proximal"
        self._has_skipped_pass = False
        self._tokens = 0
        """Tokens of this rank's share of the present step."""
        self.on_pass: OnPass = lambda *_: None
        """Called after each pass with a gradient, and within it after each layer."""
        self._passes, self._passed_tokens, self._total_passes = 0, 0, 0
        self.pending_notes: list[str] = []
        """Messages for the operator that are not yet printed."""
        self._planner = ThreadPoolExecutor(1, "plan")
        self._threads = 1 if deterministic else self._choose_threads()
        self.last_rows: tuple[BatchRow, ...] = ()
        """All rows of the latest batch with their advantages, including those without a gradient."""
        self.last_trained: tuple[BatchRow, ...] = ()
        """Those that have a gradient."""

    def _choose_threads(self) -> int:
        """The threads of an update; a rank and a process with a GPU have one."""
        policy = self._policy
        if self._ranks.size > 1 or policy.device.type != "cpu":
            return torch.get_num_threads()
        threads = choose_threads(policy.model)
        if threads > 1:
            self.pending_notes.append(f"updates use {threads} threads, which are faster here")
        return threads

    def train_step(self, train_batch: TrainBatch) -> dict[str, float]:
        """Makes a training step and returns its metrics. A batch without a gradient changes nothing.

        Errors about numbers that are not finite name the rollout.
        """
        with self._undone_on_error(train_batch), use_threads(self._threads):
            means, step_means = MetricMeans(), MetricMeans()
            advantages = self._compute_advantages(train_batch, step_means)
            self.last_rows, self.last_trained = advantages.all_rows, advantages.rows
            if not advantages.rows:
                return advantages.metrics | step_means.metrics
            self._tokens = 0
            update = self._policy.settings
            minibatches = [
                self._split_into_micro_batches(advantages, span, step_means)
                for span in split_evenly(len(advantages.rows), update.minibatches)
            ]
            is_single_step = update.epochs * len(minibatches) == 1
            self._passes, self._passed_tokens = 0, 0
            self._total_passes = update.epochs * sum(map(len, minibatches))
            self.on_pass(0, self._total_passes, 0)
            sample = None
            is_supervised = ALGORITHMS[self._algorithm.name].is_supervised
            if not (is_single_step or is_supervised):
                minibatches, sample = self._add_old_logprobs(minibatches)
            for _ in range(update.epochs):
                for minibatch in minibatches:
                    parts = self._accumulate_gradient(minibatch, advantages, len(minibatches), is_single_step, means)
                    self._ranks.report("the optimizer step")
                    loss, entropy, tokens = self._ranks.add(parts)
                    step_means.add({"loss": loss} | self._policy.step(), 1)
                    step_means.add(self._adapt_entropy_bonus(entropy / max(1.0, tokens)), 1)
            means.merge(self._ranks)
            metrics = advantages.metrics | means.metrics | step_means.metrics
            if not is_supervised:
                metrics["mismatch/pass_skipped"] = float(is_single_step or sample is not None)
            if sample:
                metrics |= {"mismatch/mean": sample.mean, "mismatch/max": sample.maximum, "mismatch/kl": sample.kl}
            if self._critic:
                micro_batches = [micro_batch for minibatch in minibatches for micro_batch in minibatch]
                metrics["critic/loss"] = self._update_critic(self._critic, micro_batches)
            return metrics | (measure_ranks(self._ranks, self._tokens) if self._ranks.size > 1 else {})

    @contextmanager
    def _undone_on_error(self, train_batch: TrainBatch) -> Iterator[None]:
        """Drops the gradients that an error leaves behind, and explains one about memory."""
        try:
            yield
        except BaseException as error:
            self._policy.zero_grad()
            if self._critic:
                self._critic.zero_grad()
            if is_out_of_memory(error):
                longest = max((len(sequence.ids) for sequence in train_batch.sequences), default=0)
                remedy = suggest_remedy(self._policy.model, self._policy.settings, longest)
                raise PolicyError(f"memory ran out in step {self._policy.steps + 1}", remedy) from error
            raise

    def _compute_advantages(self, train_batch: TrainBatch, means: MetricMeans) -> TokenAdvantages:
        kl, reference_kl, values = self._algorithm.kl, None, None
        if self._reference and kl.in_reward:
            reference_kl = self._compute_reference_kl(train_batch, self._reference)
            tokens = sum(weight > 0 for sequence in train_batch.sequences for weight in sequence.weights)
            means.add({"kl/reference": sum(reference_kl) / max(1, tokens)}, 1)
        if self._critic:
            values = self._compute_critic_values(train_batch, self._critic)
        return compute_token_advantages(train_batch, self._algorithm, reference_kl=reference_kl, values=values)

    @torch.no_grad()
    def _compute_reference_kl(self, train_batch: TrainBatch, reference: Reference) -> list[float]:
        """The KL of each rollout, as it was sampled, to the reference policy."""
        kl = [0.0] * len(train_batch.rewards)
        for micro_batch, plan in self._pass_without_gradient(train_batch):
            batch = micro_batch.batch
            batch = batch.with_ref_logprobs(recompute_logprobs(batch, reference, self._temperature, plan))
            kl_T = estimate_kl(batch.engine_logprobs_T, batch, self._algorithm.kl.estimator)
            indexes = micro_batch.indexes
            for index, value in zip(indexes, batch.sum_by_sequence(kl_T).tolist(), strict=bool(indexes)):
                kl[train_batch.sequences[index].rollout_index] += value
        return self._ranks.add(kl)

    @torch.no_grad()
    def _compute_critic_values(self, train_batch: TrainBatch, critic: Critic) -> list[list[float]]:
        """The critic's value before each token of each sequence."""
        sizes = [len(sequence.ids) for sequence in train_batch.sequences]
        spans = list(pairwise(accumulate(sizes, initial=0)))
        values = [0.0] * sum(sizes)
        for micro_batch, plan in self._pass_without_gradient(train_batch):
            values_T = iter(critic.compute_values(micro_batch.batch, plan).tolist())
            for index in micro_batch.indexes:
                values[slice(*spans[index])] = islice(values_T, sizes[index])
        values = self._ranks.add(values)
        return [values[start:stop] for start, stop in spans]

    def _pass_without_gradient(self, train_batch: TrainBatch) -> Iterator[tuple[MicroBatch, PassPlan | None]]:
        """This rank's micro-batches of all sequences, with the plan for another model than the policy."""
        rows = [
            build_row(sequence, [0.0] * len(sequence.ids), train_batch.groups[sequence.rollout_index])
            for sequence in train_batch.sequences
        ]
        for number, (micro_batch, plan) in enumerate(plan_ahead(self._make_micro_batches(rows)[0])):
            self._ranks.report(f"pass {number + 1} without a gradient")
            yield micro_batch, _without_experts(plan)

    def _make_micro_batches(self, rows: Sequence[BatchRow]) -> tuple[list[MicroBatch], DealtRows]:
        """This rank's micro-batches, as many as every other rank has, and the shares of all ranks."""
        dealt, shares = deal_batches(rows, self._ranks, self._policy.settings.pass_tokens)
        device = self._policy.device
        micro_batches = [
            MicroBatch(batch.to(device), batch, own, cache(partial(self._planner.submit, self._plan, batch)))
            for batch, own in dealt
        ]
        return micro_batches, shares

    def _split_into_micro_batches(
        self, advantages: TokenAdvantages, span: slice, step_means: MetricMeans
    ) -> list[MicroBatch]:
        """This rank's micro-batches of a minibatch; as many as every other rank has."""
        rows, returns = advantages.rows[span], advantages.returns[span]
        micro_batches, shares = self._make_micro_batches(rows)
        if self._ranks.size > 1:
            step_means.add({"distributed/imbalance": shares.imbalance}, 1)
            self._tokens += shares.costs[self._ranks.share]
        for micro_batch in micro_batches:
            if (experts_TX := micro_batch.on_host.experts_TX) is not None:
                from trainer.policy.router_replay import require_known

                require_known(experts_TX, self._policy.model)
                known_T = (experts_TX >= 0).any(-1)
                step_means.add({"mismatch/replayed": float(known_T.float().mean())}, len(known_T))
        if returns:
            micro_batches = [self._add_returns(micro_batch, returns) for micro_batch in micro_batches]
        if self._reference and not self._algorithm.kl.in_reward:
            micro_batches = self._add_reference(micro_batches, self._reference)
        return micro_batches

    def _add_returns(self, micro_batch: MicroBatch, returns: Sequence[Sequence[float]]) -> MicroBatch:
        targets = [value for index in micro_batch.indexes for value in returns[index]]
        returns_T = torch.tensor(targets or [0.0] * len(micro_batch.on_host.ids_T))
        return replace(micro_batch, returns_T=move_tensor(returns_T, self._policy.device))

    @torch.no_grad()
    def _add_reference(self, micro_batches: Sequence[MicroBatch], reference: Reference) -> list[MicroBatch]:
        vocabulary = self._policy.model.config.get_text_config(decoder=True).vocab_size
        top, batches = min(self._algorithm.kl.top_k, vocabulary), list[Batch]()
        for number, (micro_batch, plan) in enumerate(plan_ahead(micro_batches)):
            self._ranks.report(f"pass {number + 1} of the reference")
            batch, plan = micro_batch.batch, _without_experts(plan)
            if not top:
                batches.append(batch.with_ref_logprobs(recompute_logprobs(batch, reference, self._temperature, plan)))
                continue
            found = reference.compute_top_logprobs(trained_tokens(batch, self._temperature), top, plan)
            is_known_TK = found.ids_TK < vocabulary  # Vocabularies are padded, to different sizes.
            ids_TK = torch.where(is_known_TK, found.ids_TK, 0)
            logprobs_TK = found.logprobs_TK.masked_fill(~is_known_TK, -inf)
            # All micro-batches of a step wait in the host's memory; the device has those of one.
            batches.append(batch.with_ref_top(TopLogprobs(ids_TK.int().cpu(), logprobs_TK.cpu())))
        if not top:
            check_trained_finite(batches, "ref_logprobs_T")
        return [replace(part, batch=batch) for part, batch in zip(micro_batches, batches, strict=True)]

    def _add_old_logprobs(self, minibatches: list[list[MicroBatch]]) -> tuple[list[list[MicroBatch]], Mismatch | None]:
        """Replaces the engine's logprobs by the policy's from before the step, except for stale tokens.

        If an exact engine agrees on a sample, its logprobs are kept, and the pass over the batch is skipped.
        """
        every = [micro_batch for minibatch in minibatches for micro_batch in minibatch]
        sample = self._measure_sample(next((each for each in every if len(each.batch.fresh_K)), every[0]))
        if self._exact and sample.is_within(MAX_EXACT_MISMATCH) and not self._proximal:
            if not self._has_skipped_pass:
                self.pending_notes.append(
                    f"the engine's logprobs are exact ({sample.maximum:.1e} off at most):"
                    " old logprobs are not recomputed"
                )
            self._has_skipped_pass = True
            return minibatches, sample
        recomputed = iter([self._recompute_old_logprobs(*planned) for planned in plan_ahead(every)])
        minibatches = [list(islice(recomputed, len(minibatch))) for minibatch in minibatches]
        check_trained_finite([part.batch for minibatch in minibatches for part in minibatch], "old_logprobs_T")
        return minibatches, None

    def _measure_sample(self, sample: MicroBatch) -> Mismatch:
        """The mismatch of a micro-batch of each rank; a rank without fresh tokens makes its pass, too."""
        own = measure_mismatch(self._recompute_old_logprobs(sample, sample.start_plan().result()).batch)
        return merge_mismatches([Mismatch(*values) for values in self._ranks.gather(astuple(own))])

    def _recompute_old_logprobs(self, micro_batch: MicroBatch, plan: PassPlan | None) -> MicroBatch:
        """Returns the micro-batch unchanged if all of its tokens are stale, unless other ranks wait for the pass."""
        if self._ranks.size == 1 and not self._proximal and not len(micro_batch.batch.fresh_K):
            return micro_batch
        old_T = recompute_logprobs(micro_batch.batch, self._policy.logprob_reader, self._temperature, plan)
        return replace(micro_batch, batch=micro_batch.batch.with_old_logprobs(old_T, self._proximal))

    def _accumulate_gradient(
        self,
        minibatch: Sequence[MicroBatch],
        advantages: TokenAdvantages,
        minibatches: int,
        is_single_step: bool,
        means: MetricMeans,
    ) -> tuple[float, float, float]:
        """Accumulates gradients over micro-batches; returns this rank's part of the loss, the sum of its tokens'
        entropies, and their number. If this is the only optimizer step, the logprobs of its forward pass are the old
        policy's too."""
        losses, algorithm = list[Loss](), self._with_entropy_bonus()
        for number, (micro_batch, plan) in enumerate(plan_ahead(minibatch)):
            self._ranks.report(f"pass {number + 1} of {len(minibatch)}")
            batch = micro_batch.batch
            inputs = trained_tokens(batch, self._temperature)
            with self._report_layers(len(batch.ids_T)):
                others_TK = batch.ref_top.ids_TK.to(batch.ids_T) if batch.ref_top else None
                new = self._policy.logprob_reader.compute_batch_logprobs(inputs, plan, others_TK)
                if is_single_step:
                    batch = batch.with_old_logprobs(new.logprobs_T.detach(), self._proximal)
                part = compute_loss(new.logprobs_T, batch, advantages.totals, algorithm, new.entropy_T, new.top_TK)
                value = part.value * minibatches
                value.backward()  # type: ignore[no-untyped-call]
            trim_heap(self._policy.model)
            numbers = {"loss": value.detach(), "entropy": new.entropy_T.detach().sum()}
            losses.append(replace(part, value=value.detach(), numbers={**part.numbers, **numbers}))
            self._passes, self._passed_tokens = self._passes + 1, self._passed_tokens + len(batch.ids_T)
            self.on_pass(self._passes, self._total_passes, self._passed_tokens)
        loss, entropies, tokens = 0.0, 0.0, 0
        for micro_batch, part, metrics in zip(minibatch, losses, read_losses(losses), strict=True):
            loss += metrics.pop("loss")
            if micro_batch.indexes:
                entropies, tokens = entropies + metrics["entropy"], tokens + part.tokens
                means.add(metrics | {"entropy": metrics["entropy"] / max(1, part.tokens)}, part.tokens)
        return loss, entropies, tokens

    def _with_entropy_bonus(self) -> AlgorithmSettings:
        """The settings with the coefficient that the entropy of the last optimizer step asks for."""
        adaptive, state = self._algorithm.adaptive_entropy, self._policy.step_state
        if adaptive is None:
            return self._algorithm
        is_low = state.get(LAST_ENTROPY, inf) <= adaptive.target
        coefficient = state.get(COEFFICIENT, self._algorithm.entropy_coefficient) if is_low else 0.0
        return self._algorithm.model_copy(update={"entropy_coefficient": coefficient})

    def _adapt_entropy_bonus(self, entropy: float) -> dict[str, float]:
        """Changes the coefficient after an optimizer step; the metric of it."""
        adaptive, state = self._algorithm.adaptive_entropy, self._policy.step_state
        if adaptive is None:
            return {}
        change = adaptive.delta if entropy <= adaptive.target else -adaptive.delta
        coefficient = state.get(COEFFICIENT, self._algorithm.entropy_coefficient) + change
        state |= {COEFFICIENT: min(max(coefficient, adaptive.min), adaptive.max), LAST_ENTROPY: entropy}
        return {COEFFICIENT: state[COEFFICIENT]}

    def _plan(self, batch: Batch) -> PassPlan | None:
        reader = self._policy.logprob_reader
        if batch.experts_TX is not None and (reader.fallback_reason or self._policy.settings.compile):
            from trainer.policy.router_replay import REMEDY

            why = reader.fallback_reason or "compiled layers do not take them"
            raise PolicyError(f"the engine's experts cannot be taken in training: {why}", REMEDY)
        inputs = batch.ids_T, batch.sequence_T, batch.trained_T
        return reader.plan(*inputs, batch.experts_TX, batch.images)

    def _report_layers(self, tokens: int) -> AbstractContextManager[None]:
        """Reports the layers of a pass. Not where each sequence has a pass of its own, nor where ranks share weights,
        which have hooks of their own, nor in compiled layers."""
        if self._policy.logprob_reader.fallback_reason or self._ranks.size > 1 or self._policy.settings.compile:
            return nullcontext()
        progress = PassProgress(self._policy.model, checkpointing=self._policy.settings.gradient_checkpointing)
        passes, passed, total = self._passes, self._passed_tokens, self._total_passes
        return progress.follow(lambda share: self.on_pass(passes + share, total, passed + int(share * tokens)))

    def _update_critic(self, critic: Critic, micro_batches: Sequence[MicroBatch]) -> float:
        written = torch.cat([micro_batch.on_host.mask_T for micro_batch in micro_batches]).sum()
        tokens = int(self._ranks.add([int(written)])[0])
        losses = [
            critic.accumulate_gradient(micro_batch.batch, micro_batch.returns_T, tokens, _without_experts(plan))
            for micro_batch, plan in plan_ahead(micro_batches)
            if micro_batch.returns_T is not None
        ]
        critic.step()
        return self._ranks.add([sum(torch.stack(losses).tolist())])[0]
