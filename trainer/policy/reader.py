"""A reader says how likely each token was that somebody wrote; it never needs more logits at a time than a chunk's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.policy.attention import NAME, register
from trainer.policy.errors import PolicyError
from trainer.policy.forest import forest, places
from trainer.policy.sight import Sight, words_of
from trainer.vision.eyes import Eyes

log = logging.getLogger(__name__)
PROBE = ((0, 1, 2, 3, 1), (0, 1, 3), (2, 0, 1, 1))
"""Rows that share a beginning or do not: whoever reads these together as it reads them alone, is read together."""
NEAR = 1e-3
"""Between logprobs read together and alone: rounding is far below, and a mistake far above."""
LAYERS = {"full_attention", "sliding_attention"}
"""What a layer may be called in a configuration whose rows can be read together."""


class Read(NamedTuple):
    """Of each token, 0 where it was not asked for."""

    logprobs_T: Tensor
    entropy_T: Tensor
    """Of the distribution that it was drawn from; no gradient goes this way."""


class Hidden(NamedTuple):
    values_UD: Tensor
    """What the model holds of each node."""
    at_T: Tensor
    """Of each token, its node."""


class Reads(Protocol):
    """Whoever tells how likely tokens were."""

    def read(
        self, ids_T: Tensor, sequence_T: Tensor, among_T: Tensor, temperature: float = 1.0, images: Sequence[Image] = ()
    ) -> Read:
        """Ids below 0 are places in the images, counted down from the first of the first."""
        ...


class Reader:
    """A model on rows that lie end to end."""

    def __init__(
        self, model: PreTrainedModel, chunk: int, dtype: torch.dtype = torch.float32, eyes: Eyes | None = None
    ) -> None:
        self.model, self.chunk, self.dtype, self._eyes = model, chunk, dtype, eyes
        self._words = words_of(model)
        before = self._words.config._attn_implementation
        register()
        self.note = self._alone()
        """Why rows are read one after the other, where they are."""
        if self.note:
            self._words.set_attn_implementation(before)
            log.warning("%s", self.note)

    def _alone(self) -> str:
        """Tries both ways on a few tokens: it asks less of a model than knowing it."""
        config = self.model.config.get_text_config(decoder=True)
        ids_T = torch.tensor([token for row in PROBE for token in row], device=self.model.device)
        sequence_T = torch.tensor([place for place, row in enumerate(PROBE) for _ in row], device=self.model.device)
        asked = ids_T, sequence_T, places(sequence_T) > 0, 1.0
        why = ""
        with torch.no_grad():
            apart_T = self._each(*asked).logprobs_T
            try:
                self._words.set_attn_implementation(NAME)
                off = float((self._shared(*asked).logprobs_T - apart_T).abs().max())
                if not off < NEAR * max(1.0, float(apart_T.abs().max())):
                    why = f"logprobs would be off by {off:.2g}"
            except Exception as error:  # a model's own code fails in its own ways
                why = f"{type(error).__name__}: {error}"
        if strange := sorted({*(getattr(config, "layer_types", None) or ())} - LAYERS):
            why = f"it has layers of kind {strange[0]}"
        return f"a {config.model_type} is learned from one rollout after the other, since {why}" if why else ""

    def read(
        self, ids_T: Tensor, sequence_T: Tensor, among_T: Tensor, temperature: float = 1.0, images: Sequence[Image] = ()
    ) -> Read:
        """Of the tokens `among_T`, given those before each in its sequence; nobody wrote the first of one."""
        among_T = among_T & (places(sequence_T) > 0)
        how = self._each if self.note else self._shared
        with self._cast():
            return how(ids_T, sequence_T, among_T, temperature, images)

    def finds(self, ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        """Of each id but the first, as the weights are: what an engine is held against that has them too. Each place in
        an image is one as well, of which nothing is told: 0."""
        sight = self._sight(images)
        ids_T = torch.tensor(sight.wide(ids) if sight else ids, device=self.model.device)
        how = self._each if self.note else self._shared
        with torch.no_grad():
            among_T = (places(torch.zeros_like(ids_T)) > 0) & (ids_T >= 0)
            read = how(ids_T, torch.zeros_like(ids_T), among_T, 1.0, images)
        return read.logprobs_T[1:].tolist()

    def hidden(self, ids_T: Tensor, sequence_T: Tensor, images: Sequence[Image] = ()) -> Hidden:
        base = self.model.base_model
        with self._cast():
            if not self.note:
                return self._grown(ids_T, sequence_T, images)
            rows = self._rows(ids_T, sequence_T, images)
            parts = [base(**row, use_cache=False).last_hidden_state[0] for _, row in rows]
        return Hidden(torch.cat(parts), torch.arange(len(ids_T), device=ids_T.device))

    def _sight(self, images: Sequence[Image]) -> Sight | None:
        if not images:
            return None
        if self._eyes is None:
            raise PolicyError(
                "there are images to learn from, and no eyes to see them", "load the model from its folder"
            )
        return Sight(self.model, self._eyes, images)

    def _rows(
        self, ids_T: Tensor, sequence_T: Tensor, images: Sequence[Image]
    ) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """Each by itself, as the model's own way takes it."""
        sight = self._sight(images)
        for span in _spans(sequence_T):
            yield span, sight.alone(ids_T[span]) if sight else {"input_ids": ids_T[None, span]}

    def _cast(self) -> AbstractContextManager[None]:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.model.device.type, self.dtype if enabled else None, enabled)

    def _grown(self, ids_T: Tensor, sequence_T: Tensor, images: Sequence[Image]) -> Hidden:
        grown, sight = forest(ids_T, sequence_T), self._sight(images)
        if sight:
            places_3U = torch.zeros(3, len(grown.ids_U), dtype=torch.long, device=ids_T.device)
            places_3U[:, grown.at_T] = sight.places(ids_T, sequence_T)
            out = self._words(**sight.together(grown.ids_U, places_3U), use_cache=False, forest=grown)
        else:
            out = self.model.base_model(
                input_ids=grown.ids_U[None], position_ids=grown.places_U[None], use_cache=False, forest=grown
            )
        return Hidden(out.last_hidden_state[0], grown.at_T)

    def _shared(
        self, ids_T: Tensor, sequence_T: Tensor, among_T: Tensor, temperature: float, images: Sequence[Image] = ()
    ) -> Read:
        """Tokens that follow the same node are drawn from one distribution, which is computed once."""
        hidden = self._grown(ids_T, sequence_T, images)
        wanted_K = among_T.nonzero()[:, 0]
        if not len(wanted_K):
            return _read(wanted_K, [], sequence_T)
        node_N, of_K = torch.unique(hidden.at_T[wanted_K - 1], return_inverse=True)
        order_K = of_K.argsort(stable=True)
        wanted_K, of_K = wanted_K[order_K], of_K[order_K]
        borders_N = [*range(0, len(node_N), self.chunk), len(node_N)]
        borders_K = torch.searchsorted(of_K, torch.tensor(borders_N, device=of_K.device)).tolist()
        parts = []
        for nodes, tokens in zip(pairwise(borders_N), pairwise(borders_K), strict=True):
            near_CD = embedding(node_N[slice(*nodes)], hidden.values_UD)
            drawn = of_K[slice(*tokens)] - nodes[0], ids_T[wanted_K[slice(*tokens)]]
            if len(node_N) <= self.chunk:
                parts.append(self._picked(near_CD, *drawn, temperature))
            else:
                parts.append(checkpoint(self._picked, near_CD, *drawn, temperature, use_reentrant=False))
        return _read(wanted_K, parts, sequence_T)

    def _picked(self, hidden_CD: Tensor, of_K: Tensor, ids_K: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return _drawn(head(hidden_CD), of_K, ids_K, temperature)

    def _each(
        self, ids_T: Tensor, sequence_T: Tensor, among_T: Tensor, temperature: float, images: Sequence[Image] = ()
    ) -> Read:
        """The model's own way, from ids to logits."""
        wanted, parts = [], []
        for span, row in self._rows(ids_T, sequence_T, images):
            here_K = among_T[span].nonzero()[:, 0]
            if len(here_K):
                logits_LV = self.model(**row, use_cache=False).logits[0]
                parts.append(_drawn(logits_LV, here_K - 1, ids_T[span][here_K], temperature))
                wanted.append(here_K + span.start)
        return _read(torch.cat(wanted) if wanted else ids_T[:0], parts, sequence_T)


def _drawn(logits_CV: Tensor, of_K: Tensor, ids_K: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits_CV = logits_CV.float()
    scaled_CV = logits_CV if temperature == 1 else logits_CV / temperature
    logprobs_CV = scaled_CV.log_softmax(-1)
    with torch.no_grad():
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    return logprobs_CV[of_K, ids_K], entropy_C[of_K]


def _read(wanted_K: Tensor, parts: list[tuple[Tensor, Tensor]], like_T: Tensor) -> Read:
    nothing_T = torch.zeros_like(like_T, dtype=torch.float32)
    if not parts:
        return Read(nothing_T, nothing_T)
    logprobs_K, entropy_K = (torch.cat(each) for each in zip(*parts, strict=True))
    return Read(nothing_T.index_put((wanted_K,), logprobs_K), nothing_T.index_put((wanted_K,), entropy_K))


def _spans(sequence_T: Tensor) -> Iterator[slice]:
    """Of each sequence."""
    borders = [0, *(sequence_T.diff().nonzero()[:, 0] + 1).tolist(), len(sequence_T)]
    return (slice(start, stop) for start, stop in pairwise(borders))
