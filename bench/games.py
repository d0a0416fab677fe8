"""A game of TextArena, unchanged: a tiny model that knows the moves, and plays at random, learns from reward alone.

python bench/games.py                        # needs `make environments`; writes bench/results/guess.json
python bench/games.py --seeds 0 --steps 5    # a small part of it; writes nothing without --out

For each seed, the model is shown games that were played at random: so it knows the moves, and not when to make which.
Then the game's run file, which ships, is run with that model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import yaml  # noqa: E402
from bars import JOBS, describe_environment, run_command  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from gateway.chat_messages import chat_content  # noqa: E402
from gateway.types import Task  # noqa: E402
from mtrl_plugins.demo.facts.facts_demo import CHAT_TEMPLATE, SPECIAL_TOKENS, save_model, train_tokenizer  # noqa: E402
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe, WarmStartSetup, warm_start  # noqa: E402
from mtrl_plugins.environments.episodes import LOOP, add_observation, reset_call, text_call  # noqa: E402
from trainer.ledger import Author, Entry, Ledger  # noqa: E402
from trainer.model import load_model  # noqa: E402
from trainer.rollout.settings import BaseRolloutSettings  # noqa: E402
from trainer.setup import make_gateway  # noqa: E402
from trainer.storage.run_files import METRICS_FILE, read_metrics  # noqa: E402
from trainer.template import Template  # noqa: E402

RESULTS = ROOT / "bench" / "results"
PYTHON = ROOT / ".environments" / "textarena" / "bin" / "python"
GAMES: Mapping[str, Sequence[str]] = {"guess": [f"[{number}]" for number in range(1, 21)]}
"""Jobs, with all moves of their games."""
SEEDS = (0, 1, 2)
PLAYED = 320
"""Games that are played at random."""
TOKENIZED = 60
"""Further ones, with moves against the rules, whose answers have to have tokens, too."""
FIRST_SEED = 10**8
"""The seed of the first of them; no game of the training or the evaluation has it."""
WARM_STEPS = 400
"""Steps on games that were played at random."""
LR = 2e-3
PATTERN = r"(?:system|user|assistant)\n|\[\w+\]"
"""Pieces that are tokenized alone: roles and moves. Everything between them may become one token."""
Chat = list[dict[str, Any]]


async def play_at_random(
    environment: Mapping[str, Any], moves: Sequence[str], seed: int, count: int, *, repeats: bool = False
) -> list[Chat]:
    """Chats of games as the policy reads them, in which it makes no move twice, unless it `repeats` them."""
    settings = BaseRolloutSettings.model_validate({"environment": {**environment, "show_reward": True}})
    opening, chats = settings.environment.make_rows("train")[0]["prompt"], []
    async with make_gateway(settings) as gateway:
        for number in range(count):
            async with gateway.open(Task(str(number))) as session:
                result = await session.call(reset_call(FIRST_SEED + number, {}), LOOP)
                chat = [*add_observation(({"role": "user", "content": opening},), chat_content(result.parts))]
                draw = Random(f"{seed}/{number}")
                for move in draw.choices(moves, k=99) if repeats else draw.sample(moves, len(moves)):
                    chat.append({"role": "assistant", "content": move})
                    result = await session.call(text_call(move, len(chat)), LOOP)
                    if result.done:
                        break
                    chat.append({"role": "user", "content": chat_content(result.parts)})
                chats.append([dict(message) for message in chat])
    return chats


def build_model(folder: Path, chats: Sequence[Chat], seed: int) -> Path:
    """A tiny model with random weights, whose tokens are those of these chats."""

    def texts(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
        for chat in chats:
            yield str(tokenizer.apply_chat_template(chat, tokenize=False))

    return save_model(folder, train_tokenizer(SPECIAL_TOKENS, CHAT_TEMPLATE, texts, PATTERN), seed)


class ChatWriter(DemonstrationWriter):
    """Writes chats as ledgers."""

    def write(self, problem: Any, draw: Random, call_probability: float = 1.0) -> Ledger:
        opening, *rest = problem
        ledger = Ledger((Entry(Author.TASK, self.template.encode_prompt([opening], ()), (opening,)),))
        for message in rest:
            if message["role"] == "assistant":
                ledger += self._policy_entry(message)
            else:
                ledger += Entry(Author.FEEDBACK, self.template.encode_tail([message], ended=True))
        return ledger


def learn_chats(folder: Path, chats: Sequence[Chat]) -> None:
    """Trains the model in a folder on the policy's turns of these chats."""
    model, writer = load_model(folder), ChatWriter(Template.load(folder), ())
    setup = WarmStartSetup(writer, lambda _seed, _kinds: cycle(cast("Any", chats)))
    warm_start(model, setup, Recipe(skill_steps=WARM_STEPS, habit_steps=0))
    model.save_pretrained(folder)


def train_seed(game: str, seed: int, steps: int | None, folder: Path) -> dict[str, Any]:
    """The model that plays at random, and what the job makes of it."""
    job = yaml.safe_load((JOBS / f"{game}.yaml").read_text(encoding="utf-8"))
    job["environment"]["python"] = str(PYTHON)
    played = PLAYED if steps is None else 50
    play = partial(play_at_random, job["environment"], GAMES[game], seed)
    chats = anyio.run(play, played)
    against_the_rules = anyio.run(partial(play, repeats=True), TOKENIZED)
    model = build_model(folder / "model", [*chats, *against_the_rules], seed)
    file = folder / f"{game}.yaml"
    warm = time.process_time()
    learn_chats(model, chats)
    warm = time.process_time() - warm
    job["update"]["lr"] = LR
    job |= {"model": str(model), "seed": seed, **({} if steps is None else {"steps": steps})}
    job["evaluation"]["after"] = False
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    run = folder / "run"
    _, grpo = run_command(["--config", str(file), "--out", str(run)], folder)
    output, _ = run_command(["eval", str(run), "--json"], folder)
    curve = [
        round(step["success/sampled"], 4) for step in read_metrics(run / METRICS_FILE) if "success/sampled" in step
    ]
    return {
        "seed": seed, "warm_core_s": round(warm, 1), "grpo_core_s": round(grpo, 1),
        "compared": json.loads(output), "curve": curve,
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--game", choices=GAMES, default="guess")
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    about = describe_environment("shell") | {
        "job": f"`python bench/games.py --game {args.game}`",
        "core-s": "of the warm start, without imports; of the run, with its children and imports",
    }
    out = args.out or (RESULTS if args.steps is None else None)
    seeds: list[dict[str, Any]] = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            seeds.append(train_seed(args.game, seed, args.steps, Path(folder)))
        print(json.dumps(seeds[-1]), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{args.game}.json").write_text(json.dumps({"about": about, "seeds": seeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
