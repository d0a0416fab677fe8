"""The reference of the KL term: the policy before training, a teacher's folder, or a teacher that a server has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch
from torch import Tensor

from trainer.algorithms.packing import TopLogprobs
from trainer.algorithms.settings import KLSettings, ReferenceSettings
from trainer.engine.base import EngineError
from trainer.engine.sglang.http_client import ConnectionBroken, RequestRefused, SGLangClient, run_all
from trainer.policy.logprobs import Logprobs, PackedTokens, PassPlan, Reference
from trainer.policy.memory_parts import load_meta_model
from trainer.policy.policy import Policy
from trainer.policy.settings import PolicyError
from trainer.pretrained import load_tokenizer
from trainer.template.tokenizer import FencedTokenizer

RUNNING_REQUESTS = 64
"""Requests to a teacher's server at a time."""
DECODED_IDS = 8192
"""Ids that a server is asked to decode at a time."""
REFUSED_REMEDY = "it needs SGLang 0.5.17 or newer, and a context of `limits.rollout_tokens`; its log says more"
SERVER_REMEDY = "start that server again, then continue with --resume; this step has changed no weight"


def open_reference(policy: Policy, settings: KLSettings) -> Reference:
    """The reference that the settings name. Every rank opens it, and asks a server about its own share of rows."""
    reference = settings.reference
    if reference is None or reference.model is not None:
        return policy.load_reference(Path(reference.model) if reference and reference.model else None)
    return ServedReference(reference)


Pairs = list[tuple[float, int]]
"""Logprobs and ids of tokens that may stand in a place."""


class _Row(NamedTuple):
    """A sequence up to its last chosen token."""

    ids: list[int]
    first: int
    """The first chosen token."""
    chosen: Tensor
    """The places of chosen tokens in the batch."""


class ServedReference:
    """A teacher that an SGLang server has, at temperature 1 and for text only."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self._settings = settings

    def compute_batch_logprobs(self, tokens: PackedTokens, plan: PassPlan | None = None) -> Logprobs:
        """The logprobs of the selected tokens. Entropies are 0: a server does not return them."""
        logprobs_T = torch.zeros(len(tokens.ids_T), device=tokens.ids_T.device)
        for row, answer in self._ask_all(tokens):
            logprobs_T[row.chosen] = torch.tensor([pairs[0][0] for pairs in answer], device=logprobs_T.device)
        return Logprobs(logprobs_T, torch.zeros_like(logprobs_T))

    def compute_top_logprobs(self, tokens: PackedTokens, top: int, plan: PassPlan | None = None) -> TopLogprobs:
        """The most likely tokens in the place of each selected token."""
        device = tokens.ids_T.device
        pairs_TK2 = torch.zeros(len(tokens.ids_T), top, 2, dtype=torch.float64, device=device)
        for row, answer in self._ask_all(tokens, top):
            pairs_TK2[row.chosen] = torch.tensor(answer, dtype=torch.float64, device=device)
        return TopLogprobs(pairs_TK2[..., 1].long(), pairs_TK2[..., 0].float())

    def _ask_all(self, tokens: PackedTokens, top: int = 0) -> list[tuple[_Row, list[Pairs]]]:
        """The rows with, for each chosen token, its logprob and id or those of the most likely ones in its place."""
        ids_T, sequence_T, selected_T, temperature, images = tokens
        if images or temperature != 1:
            what = "images" if images else f"temperature {temperature:g}"
            remedy = "name its folder instead (`algorithm.kl.reference.model`)"
            raise PolicyError(f"the teacher at {self._settings.url} cannot be asked about {what}", remedy)
        rows = []
        for start, stop in pairwise([0, *(sequence_T.diff().nonzero()[:, 0] + 1).tolist(), len(ids_T)]):
            chosen = selected_T[start:stop].nonzero()[:, 0]
            if len(chosen := chosen[chosen > 0]):
                ids = ids_T[start : start + int(chosen[-1]) + 1].tolist()
                rows.append(_Row(ids, int(chosen[0]), start + chosen))
        answers: list[list[Pairs]] = [[]] * len(rows)

        async def ask_all(client: SGLangClient) -> None:
            limiter = anyio.CapacityLimiter(RUNNING_REQUESTS)

            async def ask(index: int) -> None:
                async with limiter:
                    answers[index] = await self._ask(client, rows[index], top)

            await run_all(partial(ask, index) for index in range(len(rows)))

        _talk(self._settings, ask_all)
        return list(zip(rows, answers, strict=True))

    async def _ask(self, client: SGLangClient, row: _Row, top: int) -> list[Pairs]:
        """Logprobs in the places of a row's chosen tokens; what is before the first may be in the server's cache."""
        body = {
            "input_ids": row.ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": row.first - 1,
            **({"top_logprobs_num": top} if top else {}),
        }
        answer = await _post(client, "/generate", body, self._settings.timeout_s)
        count = len(row.ids) - row.first
        own = [_read_pairs([item]) for item in _read(answer, "meta_info", "input_token_logprobs")[-count:]]
        if [id for pairs in own for _, id in pairs] != row.ids[row.first :]:
            raise EngineError(f"SGLang at {client.url} does not return the logprobs of the ids that it was sent")
        found = (
            [_read_pairs(items) for items in _read(answer, "meta_info", "input_top_logprobs")[-count:]] if top else own
        )
        if [len(pairs) for pairs in found] != [top or 1] * count:
            raise EngineError(f"SGLang at {client.url} does not return the {top} most likely tokens of each place")
        pairs = [found[index] for index in (row.chosen - row.chosen[0]).tolist()]
        if not all(isinstance(value, int | float) and isfinite(value) for place in pairs for value, _ in place):
            raise EngineError(f"SGLang at {client.url} returned a logprob that is no finite number")
        return pairs


def find_token_mismatch(settings: ReferenceSettings, tokenizer: FencedTokenizer, model: Path) -> str:
    """How the teacher's tokens differ from the model's, by content; empty if they are the same."""
    by_id = {id: token for token, id in tokenizer.vocabulary.items()}
    if settings.model is not None:
        folder = Path(settings.model)
        sizes = [load_meta_model(path).config.get_text_config().vocab_size for path in (model, folder)]
        if sizes[1] < sizes[0]:
            return f"the teacher {folder} has {sizes[1]} tokens, and the model {sizes[0]}"
        try:
            vocabulary = load_tokenizer(folder).get_vocab()
        except (OSError, ValueError, AttributeError) as error:
            raise PolicyError(f"{folder}: its tokenizer cannot be read: {error}", "copy the folder again") from error
        return _compare(f"the teacher {folder}", by_id, {id: token for token, id in vocabulary.items()})
    decoded: dict[int, str] = {}

    async def decode(client: SGLangClient) -> None:
        ids = sorted(by_id)
        for start in range(0, len(ids), DECODED_IDS):
            part = ids[start : start + DECODED_IDS]
            body = {"tokens": [[id] for id in part], "skip_special_tokens": False}
            texts = _read(await _post(client, "/detokenize", body, settings.timeout_s), "text")
            if len(texts) != len(part):
                raise EngineError(f"SGLang at {client.url} decoded {len(texts)} of {len(part)} ids")
            decoded.update(zip(part, (str(text).strip() for text in texts), strict=True))

    _talk(settings, decode)
    return _compare(f"the teacher at {settings.url}", {id: tokenizer.decode([id]).strip() for id in by_id}, decoded)


def _compare(teacher: str, own: Mapping[int, str], others: Mapping[int, str]) -> str:
    for id in sorted({*own, *others}):
        if own.get(id) != others.get(id):
            texts = [repr(tokens[id]) if id in tokens else "no token" for tokens in (own, others)]
            return f"{teacher} has other tokens than the model: id {id} is {texts[1]} there, and {texts[0]} here"
    return ""


def _read(answer: Any, *names: str) -> list[Any]:
    """A list within an answer, of which a server may have sent anything."""
    for name in names:
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer if isinstance(answer, list) else []


def _read_pairs(items: Any) -> Pairs:
    """The logprobs and ids in a list of a server's."""
    items = items if isinstance(items, list) else []
    return [(item[0], item[1]) for item in items if isinstance(item, list) and len(item) > 1 and type(item[1]) is int]


async def _post(client: SGLangClient, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    """Asks once more if the connection breaks: scoring has no effects."""
    try:
        return await client.post(path, body, within=timeout_s)
    except ConnectionBroken:
        return await client.post(path, body, within=timeout_s)


def _talk(settings: ReferenceSettings, talk: Callable[[SGLangClient], Awaitable[None]]) -> None:
    """Runs a conversation with the server, in an event loop of its own: the thread that trains has none."""
    url = str(settings.url)

    async def connect() -> None:
        async with SGLangClient(url) as client:
            await talk(client)

    try:
        Context().run(anyio.run, connect)
    except RequestRefused as error:
        raise PolicyError(f"the teacher refuses: {error}", REFUSED_REMEDY) from error
    except EngineError as error:
        raise PolicyError(f"the teacher does not answer: {error}", SERVER_REMEDY) from error
