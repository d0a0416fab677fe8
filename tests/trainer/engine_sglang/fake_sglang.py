"""A fake SGLang server in this process: each id determines the next one's logprobs, and its cache works as it should.

Real servers are tested in `tests/sglang`.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.types import Image
from trainer.engine.sglang.weight_sync.load_changes import LOADER, load_changes

VOCABULARY = 40
NAME = "follows.weight"
BROKEN = ("/generate", "/pause_generation", "/continue_generation")
IDS = tuple(range(5, 25))


def weights(seed: int) -> dict[str, torch.Tensor]:
    """How likely each id follows each, as logits."""
    return {NAME: torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))}


def reads(given: dict[str, torch.Tensor]) -> Callable[..., list[float]]:
    """The trainer's reading."""

    def finds(ids: Sequence[int], _: Sequence[Image] = ()) -> list[float]:
        logprobs = given[NAME].log_softmax(-1)
        return [float(logprobs[one, other]) for one, other in pairwise(ids)]

    return finds


def answer_spans(versions: Sequence[str]) -> list[dict[str, object]]:
    """Of ids in a row, as they are told: the first of each run, and the one after its last."""
    spans: list[dict[str, object]] = []
    for place, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": place})
        spans[-1]["end"] = place + 1
    return spans


def answer_events(answer: Any, new_only: bool, breaks_off: bool) -> Iterator[str]:
    """The events of a streamed answer."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    for end in range(1, len(ids) + 1):
        if breaks_off and end > 1:
            raise ConnectionError("the server is lost")
        start = end - 1 if new_only else 0
        pairs = meta["output_token_logprobs"][start:end]
        so_far = {**meta, "output_token_logprobs": pairs, "completion_tokens": end}
        event = {"text": "", "output_ids": ids[start:end], "meta_info": so_far}
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


@dataclass
class Fake:
    release: str = "0.5.23"
    info: dict[str, Any] = field(default_factory=dict)
    deaf: bool = False
    """Says that it takes weights, and takes none."""
    greedy: bool = False
    """Takes the likeliest id, whatever the temperature is."""
    original: bool = False
    """Tells logprobs of temperature 1."""
    sees: tuple[int, ...] = ()
    """How wide images are, one after the other; without any it sees none."""
    blur: float = 0.0
    """Nats, by which it finds what follows an image otherwise."""
    encodes_anew: bool = False
    """Ids that stand beside images are others, once they were text."""
    url: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=lambda: weights(0))
    version: str = "default"
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """Of each request, its path and its body."""
    cached: dict[str | None, list[tuple[int, ...]]] = field(default_factory=dict)
    updating: bool = False
    sends_new_only: bool = False
    """Events of a stream have what is new, not all so far."""
    breaks_off: bool = False
    """A stream ends in its middle."""
    going: anyio.Event = field(default_factory=anyio.Event)
    aborted: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    """Requests that are being answered."""
    hold_at: int | None = None
    """Of each continuation, so many ids are written before it waits for `released`."""
    released: anyio.Event = field(default_factory=anyio.Event)
    writing: int = 0
    held: int = 0
    """Continuations that wait for `released`."""
    adapters: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name, what is added to the weights of requests that name it."""
    ignores_adapters: bool = False
    running_adapters: list[str] = field(default_factory=list)
    """Those of requests that are being answered."""
    released_tags: set[str] = field(default_factory=set)
    fails: dict[str, Response] = field(default_factory=dict)
    """By path, what is answered in place of an answer."""
    told: Counter[str] = field(default_factory=Counter)
    """By path, how often something was looked up."""
    hung: bool = False
    """It takes what is asked, and says nothing."""
    loading_model: SimpleNamespace = field(default_factory=SimpleNamespace)
    """Stands for the model that our loader of changes is given."""
    dies_of_loader: bool = False
    chance: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def spans(self) -> bool:
        return self.release == "0.5.23"

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def break_down(self) -> None:
        self.fails = {path: JSONResponse({"detail": "broken"}, 500) for path in BROKEN}

    def start_anew(self) -> None:
        """On what it was started on."""
        self.fails, self.cached, self.adapters, self.loading_model = {}, {}, {}, SimpleNamespace()
        self.weights, self.version = weights(0), "default"

    def app(self) -> Starlette:
        served: dict[str, Callable[[Any], Any]] = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/update_weights_from_disk": self.from_disk,
            "/update_weights_from_tensor": self.from_tensor,
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.from_group,
            "/destroy_weights_update_group": self.leave,
            "/load_lora_adapter_from_tensors": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
        }
        if self.release == "0.5.23":
            served |= {"/begin_weight_update": self.begin, "/end_weight_update": self.end}
        told = {
            "/server_info": lambda: self._info(),
            "/model_info": lambda: {"weight_version": self.version, "has_image_understanding": bool(self.sees)},
            "/v1/models": lambda: {"data": [{"id": "base"}, *({"id": name} for name in self.adapters)]},
            "/openapi.json": lambda: {"paths": {path: {} for path in served}},
        }
        posts = [Route(path, self._post(path, act), methods=["POST"]) for path, act in served.items()]
        gets = [Route(path, self._get(path, act)) for path, act in told.items()]
        return Starlette(routes=[*posts, *gets])

    def _post(self, path: str, act: Callable[[Any], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            body = json.loads(await request.body())
            self.asked.append((path, body))
            if self.hung:
                await anyio.sleep_forever()
            if path == "/generate" and body.get("rid", "") in self.named - {""}:
                return JSONResponse({"detail": "Duplicate request ID detected"}, 400)
            if body.get("lora_path", "") not in {"", *self.adapters}:
                return JSONResponse({"error": {"message": f"Got LoRA adapter never loaded: {body['lora_path']}"}}, 400)
            if path not in self.fails and body.get("stream"):
                return StreamingResponse(
                    answer_events(await act(body), self.sends_new_only, self.breaks_off), media_type="text/event-stream"
                )
            return self.fails.get(path) or JSONResponse(await act(body))

        return answer

    def _get(self, path: str, act: Callable[[], Any]) -> Callable[[Request], Any]:
        async def answer(_: Request) -> Response:
            self.told[path] += 1
            if self.hung:
                await anyio.sleep_forever()
            return JSONResponse(act())

        return answer

    def _info(self) -> dict[str, Any]:
        known = {"version": self.release, "max_req_input_len": 200, "dtype": "float32", "tp_size": 1, "dp_size": 1}
        return known | self.info

    async def generate(self, body: Any) -> Any:
        await self.going.wait()
        if self.released_tags:
            self.break_down()
        ids, params, rid = list(body["input_ids"]), body["sampling_params"], body.get("rid", "")
        adapter = body.get("lora_path", "")
        self.running_adapters.append(adapter)
        cached = self._cached(body.get("extra_key"), ids)
        pairs, tops, versions, end = [], [], [], {"type": "length"}
        self.writing += 1
        self.named.add(rid)
        while len(pairs) < params["max_new_tokens"]:
            if self.hold_at == len(pairs):
                self.held += 1
                await self.released.wait()
                self.held -= 1
            await self.going.wait()
            if rid in self.aborted:
                end = {"type": "abort", "message": "told to"}
                break
            token, logprob, top = self._sample(ids, params, adapter)
            ids.append(token)
            pairs.append([logprob, token, None])
            tops.append(top)
            versions.append(self.version)
            if token in params.get("stop_token_ids", ()):
                end = {"type": "stop", "matched": token}
                break
        self.writing -= 1
        self.running_adapters.remove(adapter)
        self.named.discard(rid)
        self.cached.setdefault(body.get("extra_key"), []).append(tuple(ids[: len(ids) - bool(pairs)]))
        if self.encodes_anew and body.get("image_data"):
            ids = [*ids[:-2], ids[-1]]
        read, start = [], body.get("logprob_start_len")
        if start is not None:
            off = self.blur if body.get("image_data") else 0.0
            scored = zip(self._score(ids, adapter)[start:], ids[start + 1 :], strict=True)
            read = [[None, ids[start], None], *([value + off, token, None] for value, token in scored)]
        meta = {
            "finish_reason": end,
            "prompt_tokens": len(body["input_ids"])
            + sum(width - 1 for width, _ in zip(self.sees, body.get("image_data") or (), strict=False)),
            "cached_tokens": cached,
            "weight_version": self.version,
            "output_token_logprobs": pairs or [[-1.0, 9, None]],
            "output_top_logprobs": tops,
            "input_token_logprobs": read,
        }
        if self.info.get("speculative_algorithm"):
            meta |= {"spec_num_proposed_drafts": 4, "spec_num_correct_drafts": 3}
        if self.spans:
            meta["weight_versions"] = answer_spans(versions or [self.version])
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
        return {"text": "", "output_ids": [pair[1] for pair in pairs], "meta_info": meta}

    def _adapted(self, adapter: str) -> dict[str, torch.Tensor]:
        return {NAME: self.weights[NAME] + self.adapters[adapter]} if adapter else self.weights

    def _cached(self, name: str | None, ids: Sequence[int]) -> int:
        """All but the last can be known."""
        most = 0
        for known in self.cached.get(name, ()):
            same = next((at for at, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), len(known))
            most = max(most, same)
        return min(most, len(ids) - 1)

    def _score(self, ids: Sequence[int], adapter: str) -> list[float]:
        return reads(self._adapted(adapter))(ids)

    def _sample(self, ids: Sequence[int], params: Any, adapter: str) -> tuple[int, float, list[list[float]]]:
        return self._next(ids[-1], params, adapter)

    def _next(self, last: int, params: Any, adapter: str) -> tuple[int, float, list[list[float]]]:
        logits = self._adapted(adapter)[NAME][last].clone()
        for place, bias in params.get("logit_bias", {}).items():
            logits[int(place)] += bias
        told = (logits if self.original else logits / (params["temperature"] or 1.0)).log_softmax(-1)
        token = int(logits.argmax()) if self.greedy or not params["temperature"] else self._draw(told)
        top = [[float(value), int(place), None] for value, place in zip(*told.topk(2), strict=True)]  # type: ignore[misc]
        return token, float(told[token]), top

    def _draw(self, told: torch.Tensor) -> int:
        return int(torch.multinomial(told.exp(), 1, generator=self.chance))

    async def abort(self, body: Any) -> None:
        self.aborted.add(body["rid"])
        self.released.set()

    async def pause(self, _: Any) -> Any:
        if self.going.is_set():
            self.going = anyio.Event()
        return {"status": "ok", "message": ""}

    async def go_on(self, _: Any) -> Any:
        self.going.set()
        return {"status": "ok", "message": ""}

    async def release_memory(self, body: Any) -> None:
        """A server that still writes ends over it."""
        if self.writing and self.going.is_set():
            self.break_down()
        self.released_tags |= {*body["tags"]}
        self.cached.clear()
        if "weights" in body["tags"]:
            self.weights = {name: torch.zeros_like(value) for name, value in self.weights.items()}

    async def resume_memory(self, body: Any) -> None:
        """As does one that is asked for what it has not lent."""
        if not {*body["tags"]} <= self.released_tags:
            self.break_down()
        self.released_tags -= {*body["tags"]}

    async def begin(self, _: Any) -> Any:
        before, self.updating = self.updating, True
        return {"success": not before, "message": "already open" if before else ""}

    async def end(self, _: Any) -> Any:
        before, self.updating = self.updating, False
        return {"success": before, "message": ""}

    async def from_tensor(self, body: Any) -> Any:
        if self.spans and not self.updating:
            return {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        given = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        if body["load_format"] == LOADER:
            if self.dies_of_loader:
                self.break_down()
                raise ImportError(LOADER)
            loaded: dict[str, torch.Tensor] = {}
            self.loading_model.load_weights = loaded.update
            load_changes(self.loading_model, given)
            return self._took({name: tensor.clone() for name, tensor in loaded.items()}, body)
        flat = given["flattened_tensor"]
        named = {
            meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            for meta in given["metadata"]
        }
        return self._took(named, body)

    async def load_adapter(self, body: Any) -> Any:
        flat = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        (meta,) = flat["metadata"]
        scale = body["config_dict"]["lora_alpha"] / body["config_dict"]["r"] * (not self.ignores_adapters)
        delta = flat["flattened_tensor"].view(meta.dtype).reshape(meta.shape)
        self.adapters[body["lora_name"]] = delta * scale
        return {"success": True, "error_message": ""}

    async def unload_adapter(self, body: Any) -> Any:
        """SGLang would wait for requests that use it."""
        name = body["lora_name"]
        if name in self.running_adapters:
            await anyio.sleep_forever()
        if name not in self.adapters:
            return {"success": False, "error_message": f"LoRA with name {name} does not exist."}
        del self.adapters[name]
        return {"success": True, "error_message": ""}

    async def from_disk(self, body: Any) -> Any:
        index = json.loads((Path(body["model_path"]) / "model.safetensors.index.json").read_text())
        files = {Path(body["model_path"]) / file for file in index["weight_map"].values()}
        named = {name: value for file in files for name, value in load_file(file).items()}
        return self._took({name: named[name] for name in index["weight_map"]}, body)

    async def nothing(self, _: Any) -> Any:
        return {"success": True, "message": ""}

    join = from_group = leave = nothing

    def _took(self, named: dict[str, torch.Tensor], body: Any) -> Any:
        if self.released_tags & {"weights"}:
            return {"success": False, "message": "there is no memory for weights"}
        if not self.deaf:
            self.weights = self.weights | named
        self.version = body.get("weight_version", self.version)
        if body["flush_cache"]:
            self.cached.clear()
        return {"success": True, "message": ""}
