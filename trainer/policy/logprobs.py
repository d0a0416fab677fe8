"""Computes logprobs and entropies of packed tokens with the trainer's model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.algorithms.packing import TopLogprobs, move_tensor, token_positions
from trainer.model import device_of
from trainer.policy.head_logprobs import PLAIN, compute_head_logprobs, find_top_logprobs
from trainer.policy.prefix_forest import ATTENTION_NAME, CONTEXT, PrefixForest, build_forest, register_attention
from trainer.policy.settings import PolicyError
from trainer.vision.image_processor import ImageProcessor, PreparedImage

if TYPE_CHECKING:
    from trainer.policy.context_parallel import ContextGroup
    from trainer.policy.router_replay import RouterReplay


def language_model_of(model: PreTrainedModel) -> Any:
    """The language model inside a vision-language model, or else the model itself."""
    return getattr(model.base_model, "language_model", model)


def decoder_layers_of(model: PreTrainedModel) -> list[Any]:
    """The decoder layers; none of a model that has no list of them."""
    decoder = language_model_of(model)
    return list(getattr(getattr(decoder, "base_model", decoder), "layers", ()))


class ImagePlan(NamedTuple):
    """Where the images of a batch are among the nodes that a pass computes."""

    positions_3U: Tensor
    """Each node's position in its sequence, on three axes."""
    node_F: Tensor
    """The nodes of image tokens."""
    feature_F: Tensor
    """The row of the vision encoder's output that each of these is."""

    def to(self, device: torch.device) -> ImagePlan:
        return ImagePlan(*(move_tensor(each, device) for each in self))


class VisionInputs:
    """The images of a batch. Ids below 0 are positions in them, counted down as in `trainer.algorithms.packing`."""

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor, images: Sequence[Image]) -> None:
        self._model, self._processor, self._images, self._family = model, processor, images, processor.family
        self._prepared: list[PreparedImage] = [processor.prepare(image) for image in images]
        self._by_first_id: dict[int, PreparedImage] = {}
        next_id = -1
        for image in self._prepared:
            self._by_first_id[next_id] = image
            next_id -= image.token_count

    def expand_ids(self, ids: Sequence[int]) -> list[int]:
        """Replaces the one id per image by negative ids for all of its tokens."""
        next_id = count(-1, -1)
        expanded = self._processor.prepare_prompt(ids, self._images).ids
        return [next(next_id) if token < 0 or token == self._family.image_id else token for token in expanded]

    def plan(self, ids_T: Tensor, sequence_T: Tensor, forest: PrefixForest) -> ImagePlan:
        """Where the images are in a forest of these tokens, which are in the host's memory."""
        positions_3U = torch.zeros(3, len(forest.output_U), dtype=torch.long)
        positions_3U[:, forest.node_T] = self._compute_positions(ids_T, sequence_T)
        node_F = (forest.ids_U < 0).nonzero()[:, 0]
        own_N = slice(None) if forest.own_N is None else forest.own_N
        return ImagePlan(positions_3U[:, own_N], node_F, -1 - forest.ids_U[node_F])

    def build_forest_inputs(self, ids_U: Tensor, plan: ImagePlan) -> dict[str, Any]:
        """Inputs of the language model for all nodes of a forest at once."""
        vision_module = self._model.get_submodule(self._family.vision_module)
        features = self._family.encode(vision_module, *self._stack_pixels(self._prepared))
        embeddings_UD = self._model.get_input_embeddings()(ids_U.clamp(min=0))
        image_FD = features.features_FD[plan.feature_F].to(embeddings_UD.dtype)
        embeddings_UD = embeddings_UD.index_put((plan.node_F,), image_FD)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings_UD[None], "position_ids": plan.positions_3U[:, None]}
        if features.deepstack:
            inputs |= {
                "visual_pos_masks": (ids_U < 0)[None],
                "deepstack_visual_embeds": [features_FD[plan.feature_F] for features_FD in features.deepstack],
            }
        return inputs

    def build_row_inputs(self, ids_L: Tensor) -> Mapping[str, Tensor]:
        """Inputs of the whole model for a single sequence, as transformers takes them."""
        images = [self._by_first_id[token] for token in ids_L.tolist() if token in self._by_first_id]
        is_image_L = ids_L < 0
        inputs = {"input_ids": torch.where(is_image_L, self._family.image_id, ids_L)[None]}
        if images:
            pixels, grids = self._stack_pixels(images)
            inputs |= {
                "pixel_values": pixels,
                "image_grid_thw": grids.to(pixels.device),
                "mm_token_type_ids": is_image_L[None].int(),
            }
        return inputs

    def _compute_positions(self, ids_T: Tensor, sequence_T: Tensor) -> Tensor:
        """Each token's position in its sequence, on three axes."""
        ids, parts = ids_T.tolist(), list[Tensor]()
        for span in _sequence_spans(sequence_T):
            row = ids[span]
            grids = [
                (index, self._by_first_id[token].grid) for index, token in enumerate(row) if token in self._by_first_id
            ]
            parts.append(self._family.compute_positions(len(row), grids))
        return torch.cat(parts, dim=1)

    def _stack_pixels(self, images: Sequence[PreparedImage]) -> tuple[Tensor, Tensor]:
        device = device_of(self._model)
        pixels = torch.cat([image.pixels for image in images]).to(device, self._model.dtype)
        return pixels, torch.tensor([image.grid for image in images])


log = logging.getLogger(__name__)
PROBE_ROWS = ((0, 1, 2, 3, 1), (0, 1, 3), (2, 0, 1, 1))
"""Rows with and without a common prefix, on which both ways of computing logprobs are compared for a new model."""
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference between the two: rounding is far below, and a mistake far above."""
SHARDED_RUN = "run_pass"
"""The attribute of a sharded model that runs a function as a forward pass."""
Result = TypeVar("Result")
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types in a model's configuration that work with forest attention."""
LOGIT_OPTIONS = ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Options of a model's configuration by which its logits are others than those of its head alone."""


class Logprobs(NamedTuple):
    """The logprob and entropy of each token; 0 for tokens that were not selected."""

    logprobs_T: Tensor
    entropy_T: Tensor
    """Entropy of the distribution that the token was sampled from; has no gradient."""
    top_TK: Tensor | None = None
    """The logprobs of other tokens in its place, where those were asked for."""


class HiddenStates(NamedTuple):
    """The model's last hidden states, and where to find those of each token."""

    states_UD: Tensor
    """Hidden state of each node of the forest, or of this rank's where ranks share them."""
    node_T: Tensor
    """The node of each token."""


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass computes, made of ids in the host's memory: a GPU that gets it never waits for the host."""

    forest: PrefixForest
    node_N: Tensor
    """The nodes that a selected token follows, each once: tokens that follow the same share one distribution. Where
    ranks share nodes, their places among this rank's."""
    token_K: Tensor
    """The selected tokens, in the order of these nodes."""
    index_K: Tensor
    """The node of each, as an index into these."""
    ids_K: Tensor
    experts_UX: Tensor | None = None
    """The experts that the engine sent each node to."""
    images: ImagePlan | None = None

    @classmethod
    def make(
        cls,
        ids_T: Tensor,
        sequence_T: Tensor,
        selected_T: Tensor,
        one_kernel: bool,
        experts_TX: Tensor | None = None,
        context: ContextGroup | None = None,
    ) -> PassPlan:
        ids_T, sequence_T, selected_T = ids_T.cpu(), sequence_T.cpu(), selected_T.cpu()
        forest = build_forest(ids_T, sequence_T, one_kernel)
        experts_UX = None if experts_TX is None else _first_of_nodes(experts_TX, forest.node_T, len(forest.ids_U))
        token_K = (selected_T & (token_positions(sequence_T) > 0)).nonzero()[:, 0]
        node_K = forest.node_T[token_K - 1]
        if context:
            forest = forest.share(context)
            experts_UX = None if experts_UX is None else experts_UX[forest.own_N]
            node_K = node_K - context.rank * len(forest.ids_U)
            is_own_K = (node_K >= 0) & (node_K < len(forest.ids_U))
            token_K, node_K = token_K[is_own_K], node_K[is_own_K]
        node_N, index_K = torch.unique(node_K, return_inverse=True)
        order_K = index_K.argsort(stable=True)
        token_K = token_K[order_K]
        return cls(forest, node_N, token_K, index_K[order_K], ids_T[token_K], experts_UX)

    def to(self, device: torch.device) -> PassPlan:
        tensors = (self.node_N, self.token_K, self.index_K, self.ids_K)
        experts_UX = None if self.experts_UX is None else move_tensor(self.experts_UX, device)
        node_N, token_K, index_K, ids_K = (move_tensor(each, device) for each in tensors)
        images = self.images and self.images.to(device)
        return PassPlan(self.forest.to(device), node_N, token_K, index_K, ids_K, experts_UX, images)


class PackedTokens(NamedTuple):
    """Sequences that lie end to end, and which of their tokens are selected."""

    ids_T: Tensor
    """Ids below 0 are positions in the images, counted down from the first position of the first image."""
    sequence_T: Tensor
    selected_T: Tensor
    temperature: float = 1.0
    images: Sequence[Image] = ()


class LogprobSource(Protocol):
    """Computes logprobs of packed tokens: the policy, or a reference."""

    def compute_batch_logprobs(self, tokens: PackedTokens, plan: PassPlan | None = None) -> Logprobs:
        """`plan`: what the pass computes, if it was prepared."""
        ...


class Reference(LogprobSource, Protocol):
    """The model that a policy is compared with."""

    def compute_top_logprobs(self, tokens: PackedTokens, top: int, plan: PassPlan | None = None) -> TopLogprobs:
        """The most likely tokens in the place of each selected token."""
        ...


class LogprobReader:
    """Computes logprobs with a model, over sequences that lie end to end.

    Common prefixes are computed once (see `prefix_forest`), if the model supports it; otherwise each sequence is run
    alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk: int,
        dtype: torch.dtype = torch.float32,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.model, self.chunk, self.dtype, self._image_processor = model, chunk, dtype, image_processor
        self.head_steps = PLAIN
        """How logits of the head are worked on."""
        self._language_model = language_model_of(model)
        self._router_replay: RouterReplay | None = None
        self._context: ContextGroup | None = getattr(model, CONTEXT, None)
        original_attention = self._language_model.config._attn_implementation
        if original_attention == ATTENTION_NAME:  # Of another reader of this model.
            original_attention = "eager"
            self._language_model.set_attn_implementation(original_attention)
        register_attention()
        self.one_kernel = device_of(model).type == "cuda"
        """Whether attention over a forest is one kernel; otherwise it works on blocks."""
        self.fallback_reason = self._probe_forest_attention()
        """Why sequences are run one after the other; empty if prefixes are shared."""
        if self.fallback_reason and self.one_kernel:
            log.warning("attention works on blocks, which is slower: %s", self.fallback_reason)
            self.one_kernel = False
            self.fallback_reason = self._probe_forest_attention()
        if self.fallback_reason:
            self._language_model.set_attn_implementation(original_attention)
            log.warning("%s", self.fallback_reason)

    def _probe_forest_attention(self) -> str:
        """Compares forest attention with the model's own on a few tokens, which works for unknown models too."""
        config, device = self.model.config.get_text_config(decoder=True), device_of(self.model)
        ids_T = torch.tensor([token for row in PROBE_ROWS for token in row], device=device)
        sequence_T = torch.tensor([index for index, row in enumerate(PROBE_ROWS) for _ in row], device=device)
        selected_T, problem = token_positions(sequence_T) > 0, ""
        plan = PassPlan.make(ids_T, sequence_T, selected_T, self.one_kernel, context=self._context).to(device)
        with torch.no_grad():
            tokens = PackedTokens(ids_T, sequence_T, selected_T)
            separate_T = self._run_pass(self._compute_separately, tokens).logprobs_T
            try:
                self._language_model.set_attn_implementation(ATTENTION_NAME)
                shared_T = self._run_pass(self._compute_shared, tokens, plan).logprobs_T
                difference = float((shared_T - separate_T).abs().max())
                if not difference < MAX_DIFFERENCE[self.dtype] * max(1.0, float(separate_T.abs().max())):
                    problem = f"its logprobs would be off by {difference:.2g}"
            except Exception as error:  # boundary: a model's own code may raise anything
                problem = f"{type(error).__name__}: {error}"
        if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - SUPPORTED_LAYERS):
            problem = f"it has layers of type {unknown[0]}"
        if changed := [name for name in LOGIT_OPTIONS if getattr(config, name, None) not in (None, 1)]:
            problem = f"it changes its logits by `{changed[0]}`"
        if not problem:
            return ""
        return f"common prefixes are not shared for {config.model_type}, which makes training slower: {problem}"

    def plan(
        self,
        ids_T: Tensor,
        sequence_T: Tensor,
        selected_T: Tensor,
        experts_TX: Tensor | None = None,
        images: Sequence[Image] = (),
    ) -> PassPlan | None:
        """Prepares a pass, if possible in a thread while another is made; None where each sequence is run alone."""
        if self.fallback_reason:
            return None
        plan = PassPlan.make(ids_T, sequence_T, selected_T, self.one_kernel, experts_TX, self._context)
        vision = self._prepare_vision(images)
        return replace(plan, images=vision.plan(ids_T.cpu(), sequence_T.cpu(), plan.forest)) if vision else plan

    def _prepare(self, tokens: PackedTokens, plan: PassPlan | None) -> PassPlan | None:
        """The plan on the model's device; a new one, if none was made for its attention."""
        if plan is None or self.fallback_reason or (plan.forest.pre_order is not None) != self.one_kernel:
            plan = self.plan(*tokens[:3], images=tokens.images)
        return plan and plan.to(device_of(self.model))

    def compute_batch_logprobs(
        self, tokens: PackedTokens, plan: PassPlan | None = None, others_TK: Tensor | None = None
    ) -> Logprobs:
        """Computes the logprobs of the selected tokens, given those before each in its sequence, and those of others in
        the place of each."""
        if self.fallback_reason:
            return self._run_pass(self._compute_separately, _without_first(tokens), others_TK)
        return self._run_pass(self._compute_shared, tokens, self._prepare(tokens, plan), others_TK)

    @torch.no_grad()
    def compute_top_logprobs(self, tokens: PackedTokens, top: int, plan: PassPlan | None = None) -> TopLogprobs:
        """The most likely tokens in the place of each selected token."""
        tokens = _without_first(tokens)
        token_T, ids_TK, logprobs_TK = self._run_pass(self._find_top, tokens, self._prepare(tokens, plan), top)
        shape = len(tokens.ids_T), ids_TK.shape[1]
        return TopLogprobs(
            self._add_over_ranks(ids_TK.new_zeros(shape).index_put((token_T,), ids_TK)),
            self._add_over_ranks(logprobs_TK.new_zeros(shape).index_put((token_T,), logprobs_TK)),
        )

    def gather_nodes(self, values_N: Tensor) -> Tensor:
        """A value of each node, given those of this rank's, where ranks share rows."""
        return self._context.gather(values_N) if self._context else values_N

    def _add_over_ranks(self, values_TX: Tensor) -> Tensor:
        """Where ranks share rows, each has the values of tokens that follow its own nodes, and 0 for others."""
        return self._context.add(values_TX) if self._context else values_TX

    def _find_top(self, tokens: PackedTokens, plan: PassPlan | None, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """The selected tokens, and the ids and logprobs of what is most likely there."""
        ids_T, sequence_T, selected_T, temperature, images = tokens
        head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if plan is not None:
            states_ND = self._run_forest(plan, images).states_UD[plan.node_N]
            ids_NK, logprobs_NK = find_top_logprobs(head, states_ND, top, temperature, self.chunk)
            return plan.token_K, ids_NK[plan.index_K], logprobs_NK[plan.index_K]
        parts = [(ids_T.new_zeros(0, top), torch.zeros(0, top, device=ids_T.device))]
        for span, inputs in self._split_rows(ids_T, sequence_T, images):
            logits_LV = self.model(**inputs, use_cache=False).logits[0, :-1][selected_T[span][1:]].float()
            found = (logits_LV / temperature).log_softmax(-1).topk(top)
            parts.append((found.indices, found.values))
        ids_KO, logprobs_KO = (torch.cat(values) for values in zip(*parts, strict=True))
        return selected_T.nonzero()[:, 0], ids_KO, logprobs_KO

    def compute_logprobs(self, ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        """The logprob of each id but the first, for comparison with an engine.

        Each image token of the expanded prompt counts as an id, with a logprob of 0.
        """
        vision = self._prepare_vision(images)
        ids_T = torch.tensor(vision.expand_ids(ids) if vision else ids, device=device_of(self.model))
        with torch.no_grad():
            tokens = PackedTokens(ids_T, torch.zeros_like(ids_T), ids_T >= 0, images=images)
            result = self.compute_batch_logprobs(tokens)
        return result.logprobs_T[1:].tolist()

    def compute_hidden_states(
        self, ids_T: Tensor, sequence_T: Tensor, images: Sequence[Image] = (), plan: PassPlan | None = None
    ) -> HiddenStates:
        base = self.model.base_model
        tokens = PackedTokens(ids_T, sequence_T, torch.zeros_like(sequence_T, dtype=torch.bool), images=images)
        if plan := self._prepare(tokens, plan):
            return self._run_pass(self._run_forest, plan, images)
        rows = self._split_rows(ids_T, sequence_T, images)
        parts = [base(**inputs, use_cache=False).last_hidden_state[0] for _, inputs in rows]
        return HiddenStates(torch.cat(parts), torch.arange(len(ids_T), device=ids_T.device))

    def _run_pass(self, compute: Callable[..., Result], *inputs: Any) -> Result:
        """Runs a pass whose parts call submodules. A sharded model gathers its weights around all of it."""
        run_pass = getattr(self.model, SHARDED_RUN, None)
        result: Result = compute(*inputs) if run_pass is None else run_pass(compute, *inputs)
        return result

    def _prepare_vision(self, images: Sequence[Image]) -> VisionInputs | None:
        if not images:
            return None
        if self._image_processor is None:
            raise PolicyError("the batch has images, but the model has no image processor", "load it from its folder")
        return VisionInputs(self.model, self._image_processor, images)

    def _split_rows(
        self, ids_T: Tensor, sequence_T: Tensor, images: Sequence[Image]
    ) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """The model's inputs for each sequence alone."""
        vision = self._prepare_vision(images)
        for span in _sequence_spans(sequence_T):
            yield span, vision.build_row_inputs(ids_T[span]) if vision else {"input_ids": ids_T[None, span]}

    def _run_forest(self, plan: PassPlan, images: Sequence[Image]) -> HiddenStates:
        vision, forest = self._prepare_vision(images), plan.forest
        if plan.experts_UX is not None and self._router_replay is None:
            from trainer.policy.router_replay import RouterReplay

            self._router_replay = RouterReplay(self.model)
        if self._router_replay is not None:  # Until the next pass: with gradient checkpointing, layers run again.
            self._router_replay.experts_UX = plan.experts_UX
        # Without one, transformers looks for packed rows in the positions, and a GPU is waited for.
        mask_1U = torch.ones_like(forest.ids_U, dtype=torch.bool)[None]
        if vision and plan.images:
            inputs = vision.build_forest_inputs(forest.ids_U, plan.images)
            output = self._language_model(**inputs, attention_mask=mask_1U, use_cache=False, forest=forest)
        else:
            inputs = {"input_ids": forest.ids_U[None], "position_ids": forest.positions_U[None]}
            output = self.model.base_model(**inputs, attention_mask=mask_1U, use_cache=False, forest=forest)
        return HiddenStates(output.last_hidden_state[0], forest.node_T)

    def _compute_shared(self, *inputs: Any) -> Logprobs:
        own = self._compute_own_nodes(*inputs)
        top_TK = None if own.top_TK is None else self._add_over_ranks(own.top_TK)
        return Logprobs(self._add_over_ranks(own.logprobs_T), self._add_over_ranks(own.entropy_T), top_TK)

    def _compute_own_nodes(self, tokens: PackedTokens, plan: PassPlan, others_TK: Tensor | None = None) -> Logprobs:
        """Tokens that follow the same node share one distribution, which is computed once."""
        _, sequence_T, _, temperature, images = tokens
        hidden = self._run_forest(plan, images)
        if not len(plan.token_K):  # Nothing is selected, but a backward pass can still be made.
            zeros_T = torch.zeros_like(sequence_T, dtype=torch.float32)
            top_TK = None if others_TK is None else torch.zeros_like(others_TK, dtype=torch.float32)
            return Logprobs(zeros_T + 0 * hidden.states_UD.float().sum(), zeros_T, top_TK)
        head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        states_ND = embedding(plan.node_N, hidden.states_UD)
        index_K, ids_K = _add_others(plan.token_K, plan.index_K, plan.ids_K, others_TK)
        part = compute_head_logprobs(head, states_ND, index_K, ids_K, temperature, self.chunk, self.head_steps)
        return _scatter(plan.token_K, [part], sequence_T)

    def _compute_separately(self, tokens: PackedTokens, others_TK: Tensor | None = None) -> Logprobs:
        """Runs each sequence alone through the model's own forward pass."""
        ids_T, sequence_T, selected_T, temperature, images = tokens
        selected, parts = [], []
        for span, inputs in self._split_rows(ids_T, sequence_T, images):
            position_K = selected_T[span].nonzero()[:, 0]
            if len(position_K):
                logits_LV = self.model(**inputs, use_cache=False).logits[0]
                selected.append(position_K + span.start)
                index_K, ids_K = _add_others(selected[-1], position_K - 1, ids_T[selected[-1]], others_TK)
                parts.append(_select_logprobs(logits_LV, index_K, ids_K, temperature))
        return _scatter(torch.cat(selected) if selected else ids_T[:0], parts, sequence_T)


def _without_first(tokens: PackedTokens) -> PackedTokens:
    """The tokens, of which the first of a sequence is not selected: nothing is before it."""
    return tokens._replace(selected_T=tokens.selected_T & (token_positions(tokens.sequence_T) > 0))


def _first_of_nodes(values_TX: Tensor, node_T: Tensor, nodes: int) -> Tensor:
    """For each node, the values of the first token that is it and has any; siblings share a prefix's."""
    values_UX = values_TX.new_full((nodes, values_TX.shape[1]), -1)
    known_T = (values_TX >= 0).any(1).nonzero()[:, 0]
    first_U = torch.full((nodes,), len(values_TX)).scatter_reduce_(0, node_T[known_T], known_T, "amin")
    is_known_U = first_U < len(values_TX)
    values_UX[is_known_U] = values_TX[first_U[is_known_U]]
    return values_UX


def _select_logprobs(logits_CV: Tensor, index_K: Tensor, ids_K: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits_CV = logits_CV.float()
    scaled_CV = logits_CV if temperature == 1 else logits_CV / temperature
    logprobs_CV = scaled_CV.log_softmax(-1)
    entropy_C: Tensor = _Entropy.apply(logprobs_CV)  # type: ignore[no-untyped-call]
    return logprobs_CV[index_K, ids_K], entropy_C[index_K]


class _Entropy(torch.autograd.Function):
    """The entropy of rows of logprobs, which keeps no further copy of them for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logprobs_CV: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs_CV)
        return -(logprobs_CV.exp() * logprobs_CV).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient_C: Tensor) -> Tensor:
        logprobs_CV: Tensor
        (logprobs_CV,) = ctx.saved_tensors
        return -gradient_C[:, None] * logprobs_CV.exp() * (1 + logprobs_CV)


def _add_others(token_K: Tensor, index_K: Tensor, ids_K: Tensor, others_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is read of the distributions: each selected token, and behind it the others in its place."""
    if others_TK is None:
        return index_K, ids_K
    ids_KO = torch.cat([ids_K[:, None], others_TK[token_K]], 1)
    return index_K.repeat_interleave(ids_KO.shape[1]), ids_KO.flatten()


def _scatter(token_K: Tensor, parts: list[tuple[Tensor, Tensor]], like_T: Tensor) -> Logprobs:
    """Each token's values; of several ids in its place, the first is its own."""
    zeros_T = torch.zeros_like(like_T, dtype=torch.float32)
    if not parts:
        return Logprobs(zeros_T, zeros_T)
    logprobs_KO, entropy_KO = (torch.cat(values).view(len(token_K), -1) for values in zip(*parts, strict=True))
    logprobs_TO = zeros_T.new_zeros(len(zeros_T), logprobs_KO.shape[1]).index_put((token_K,), logprobs_KO)
    entropy_T = zeros_T.index_put((token_K,), entropy_KO[:, 0])
    return Logprobs(logprobs_TO[:, 0], entropy_T, logprobs_TO[:, 1:] if logprobs_KO.shape[1] > 1 else None)


def _sequence_spans(sequence_T: Tensor) -> Iterator[slice]:
    bounds = [0, *(sequence_T.diff().nonzero()[:, 0] + 1).tolist(), len(sequence_T)]
    return (slice(start, stop) for start, stop in pairwise(bounds))
