"""A stand-in for an SGLang server that generates with a real small model, in a process of its own.

What it samples depends on the weights, the ids and the request's seed alone, so that a turn that is asked for again,
after it or another process was killed, is the same.

    python -m tests.trainer.engine_sglang.model_server MODEL HOST PORT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.engine_sglang.fake_sglang import Fake

CONTEXT = 4096


class ModelServer(Fake):
    """Reads all ids for each new one: the models are tiny."""

    def __init__(self, folder: Path) -> None:
        super().__init__(info={"max_req_input_len": CONTEXT, "enable_deterministic_inference": True})
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.going.set()

    async def generate(self, body: Any) -> Any:
        answer = await super().generate(body)
        start, count = body.get("logprob_start_len"), body.get("top_logprobs_num", 0)
        likely: list[Any] = [None]
        answer["meta_info"]["input_top_logprobs"] = likely
        if start is not None:
            for row in self._logprobs([*body["input_ids"], *answer["output_ids"]])[start:]:
                values, places = (column.tolist() for column in row.topk(count))
                likely.append([[value, place, None] for value, place in zip(values, places, strict=True)])
        return answer

    def app(self) -> Starlette:
        app = super().app()
        app.add_route("/detokenize", self.detokenize, methods=["POST"])
        return app

    async def detokenize(self, request: Request) -> JSONResponse:
        body = await request.json()
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        skipped = body.get("skip_special_tokens", True)
        return JSONResponse({"text": [tokenizer.decode(ids, skip_special_tokens=skipped) for ids in body["tokens"]]})

    @torch.inference_mode()
    def _sample(self, ids: Sequence[int], params: Any, adapter: str) -> tuple[int, float, list[list[float]]]:
        logits = self.model(torch.tensor([ids])).logits[0, -1].float()
        for token, bias in params.get("logit_bias", {}).items():
            logits[int(token)] += bias
        logprobs = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
        if params["temperature"]:
            seed = (params.get("sampling_seed", 0) * 1_000_003 + len(ids)) % 2**63
            token = int(torch.multinomial(logprobs.exp(), 1, generator=torch.Generator().manual_seed(seed)))
        else:
            token = int(logits.argmax())
        values, places = logprobs.topk(2)
        top = [[float(value), int(place), None] for value, place in zip(values, places, strict=True)]
        return token, float(logprobs[token]), top  # type: ignore[return-value]

    def _score(self, ids: Sequence[int], adapter: str) -> list[float]:
        logprobs = self._logprobs(ids)
        return [float(row[token]) for row, token in zip(logprobs, ids[1:], strict=True)]

    @torch.inference_mode()
    def _logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)  # type: ignore[no-any-return]

    def _took(self, named: dict[str, torch.Tensor], body: Any) -> Any:
        missing, unknown = self.model.load_state_dict(named, strict=False)
        if unknown:
            return {"success": False, "message": f"unknown weights: {unknown[:3]}"}
        if missing and set(missing) != {"lm_head.weight"}:  # Tied to the embeddings.
            return {"success": False, "message": f"missing weights: {missing[:3]}"}
        self.version = body.get("weight_version", self.version)
        return {"success": True, "message": ""}


def main(folder: str, host: str, port: str) -> None:
    torch.set_num_threads(1)
    server = ModelServer(Path(folder))
    app = server.app()
    app.add_route("/health", lambda _: JSONResponse({}))
    uvicorn.run(app, host=host, port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
