"""Publishing LoRA adapters alone against merged weights, on a real SGLang server: bytes, seconds, tokens per second.

python bench/publish.py            # starts servers (`make sglang` first); writes bench/results/publish.json
python bench/publish.py --small    # smoke test on one tiny model; writes nothing without --out
python bench/publish.py --models qwen3 --no-restart --out FILE    # one model; two minutes

Each way publishes the same policy several times to the same server, which is compared with the trainer each time. Then
rollouts are generated at once; with merged weights on the same server, whose adapters then rest. For the first model,
the server is killed with -9 at the end, and has to come back with the adapters (`--no-restart` leaves this out).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from mtrl_plugins.demo.facts.facts_demo import MODEL_SHAPE  # noqa: E402
from trainer.engine.base import Agreement, Sampling  # noqa: E402
from trainer.engine.sglang.launch import TESTED  # noqa: E402
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess  # noqa: E402
from trainer.engine.sglang.sglang_engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.weight_sync.adapters import TRIED_MODELS, LoraPublish, plan_adapters  # noqa: E402
from trainer.engine.sglang.weight_sync.tensors import TensorSync  # noqa: E402
from trainer.engine.sglang.weight_sync.verify import TrainerReference  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import LoraSettings, UpdateSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
VOCABULARY = 8192
RANK = 16
PUBLISHES = 5
ROLLOUTS, TOKENS = 8, 48
PROMPT = tuple(range(40, 104))
WITHIN_S = 900


@dataclass(frozen=True, slots=True)
class WayResult:
    """What one way of publishing costs."""

    megabytes: float
    """What a server gets at each publish."""
    publish_s: float
    """The median time of a publish, merging and comparison with the trainer included."""
    tokens_per_s: float
    """Of rollouts that are generated at once."""
    agreement: float
    """The largest difference between logprobs of server and trainer, in nats."""


def save_model(folder: Path, kind: str, small: bool) -> Path:
    """A model with random weights, without a tokenizer."""
    shape: dict[str, Any] = MODEL_SHAPE if small else SHAPE
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shape, vocab_size=VOCABULARY, max_position_embeddings=1024, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def change_adapters(policy: Policy, seed: int) -> None:
    """Stands in for an update."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "lora_" in name:
                value.copy_(0.02 * torch.randn(value.shape, generator=noise))


def make_reference(policy: Policy, model: Path, publish: LoraPublish) -> TrainerReference:
    """What servers are compared with, and whether they get adapters alone."""
    plan = plan_adapters(publish, policy.adapter_shape, model, lends_memory=False)
    return TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, adapters=plan)


async def measure_way(server: str, policy: Policy, model: Path, way: LoraPublish) -> WayResult:
    """Publishes several times, then generates."""
    seconds, worst = [], 0.0
    async with SGLangEngine([server], TensorSync(), reference=make_reference(policy, model, way)) as engine:
        for version in range(1 + PUBLISHES):  # The first one does what later ones need not.
            change_adapters(policy, version)
            began = time.monotonic()
            await engine.publish(policy.weights, version)
            seconds.append(time.monotonic() - began)
            worst = max(worst, _agreement(engine).max_difference)
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for index in range(ROLLOUTS):
                sampling = Sampling(max_tokens=TOKENS, banned_ids=(1,))
                tasks.start_soon(partial(engine.generate, (*PROMPT, index), sampling, key=str(index)))
        rate = ROLLOUTS * TOKENS / (time.monotonic() - began)
        size = engine.published_bytes / 1e6
    return WayResult(round(size, 3), round(statistics.median(seconds[1:]), 3), round(rate, 1), worst)


async def measure_restart(server: ServerProcess, policy: Policy, model: Path) -> float:
    """Seconds from a kill to the answer of the server that came back, start included; checks the version."""
    async with SGLangEngine(
        [Running(server)], TensorSync(), reference=make_reference(policy, model, "adapters")
    ) as engine:
        await engine.publish(policy.weights, 7)
        began = time.monotonic()
        if server.pid is not None:
            os.killpg(server.pid, signal.SIGKILL)
        turn = await engine.generate(PROMPT, Sampling(max_tokens=4, banned_ids=(1,)))
        if turn.versions != (7,) * 4 or not _agreement(engine).is_exact:
            raise SystemExit("the restarted server has other adapters than were published")
        return round(time.monotonic() - began, 1)


def _agreement(engine: SGLangEngine) -> Agreement:
    if engine.agreement is None:
        raise SystemExit("the server was not compared with the trainer")
    return engine.agreement


class Running(ServerProcess):
    """A server that runs already, which an engine may start again."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server.model, server.options, log=server.log)
        self._server, self.url = server, server.url

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    @property
    def alive(self) -> bool:
        return self._server.alive

    async def restart(self) -> None:
        await self._server.restart()


async def run(kinds: list[str], small: bool, restarted: str | None, write: Callable[[dict[str, Any]], None]) -> None:
    """All measurements, by model type, written after each; the server of one of them is killed and restarted."""
    found: dict[str, Any] = {}
    for kind in kinds:
        with TemporaryDirectory() as folder:
            model = save_model(Path(folder) / "model", kind, small)
            policy = Policy.load(model, UpdateSettings(lora=LoraSettings(rank=RANK)), device="cpu")
            flags = make_reference(policy, model, "auto").adapters.server_flags
            options = ServerOptions(context=512, cache_tokens=16384, extra=flags)
            with anyio.fail_after(WITHIN_S):
                async with ServerProcess(model, options, log=Path(folder) / "log", notify=_tell) as server:
                    ways: dict[str, Any] = {"parameters": policy.model.num_parameters()}
                    for way in ("adapters", "merged"):  # Merged weights replace those below adapters.
                        ways[way] = asdict(await measure_way(server.url, policy, model, way))
                        _tell(f"{kind}, {way}: {ways[way]}")
                    if kind == restarted:
                        await server.restart()
                        ways["restart_s"] = await measure_restart(server, policy, model)
                        _tell(f"{kind}: came back with its adapters after {ways['restart_s']} s")
        found[kind] = ways
        write(found)


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one tiny model")
    parser.add_argument(
        "--models", nargs="+", choices=sorted(TRIED_MODELS), help="these types of models; by default all"
    )
    parser.add_argument("--no-restart", action="store_true", help="do not kill and restart a server")
    parser.add_argument("--out", type=Path, help="the file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} cores, {platform.machine()}; load {load:.1f} before the run"
    versions = f"Python {platform.python_version()}, SGLang {TESTED[-1]} on CPU"
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions}
    size = {"rank": RANK, "publishes": PUBLISHES, "rollouts": ROLLOUTS, "tokens": TOKENS}
    is_partial = arguments.small or arguments.models or arguments.no_restart
    out = arguments.out or (None if is_partial else RESULTS / "publish.json")

    def write(found: dict[str, Any]) -> None:
        if out:
            out.write_text(
                json.dumps({"about": about, "size": size, "found": found}, indent=1) + "\n", encoding="utf-8"
            )

    kinds = arguments.models or (["qwen3"] if arguments.small else list(reversed(TRIED_MODELS)))
    anyio.run(run, kinds, arguments.small, None if arguments.no_restart else kinds[0], write)


if __name__ == "__main__":
    main()
