"""Games of other packages, unchanged, learned by a tiny model from what it was shown of games played at random.

python bench/games.py                                     # `make bench-games`; writes bench/results/GAME.json
python bench/games.py --game lake --seeds 0 --steps 5     # a small part of it; writes nothing without --out
python bench/games.py --smollm2 --game guess --seeds 0    # by SmolLM2; writes bench/results/smollm2-guess.json

For each seed, the model is shown games that were played at random or, where most are lost, those that were won: so it
knows the moves, and at most a little of when to make which. Then the game's run file, which ships, is run with it.
SmolLM2 is shown the last move of games of `guess` that were won, and of the others some games that the tiny model
played as it learned.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
from bars import JOBS, describe_environment, run_command, train_seeds  # noqa: E402
from fetch_model import fetch_model  # noqa: E402
from tasksets import THREADS, Chat, learn_chats  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from gateway.chat_messages import chat_content  # noqa: E402
from gateway.types import Task  # noqa: E402
from mtrl_plugins.demo.facts.facts_demo import CHAT_TEMPLATE, SPECIAL_TOKENS, save_model, train_tokenizer  # noqa: E402
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe, WarmStartSetup, warm_start  # noqa: E402
from mtrl_plugins.environments.episodes import LOOP, add_observation, read_episode, reset_call, text_call  # noqa: E402
from trainer.cli.run_file import load_settings  # noqa: E402
from trainer.ledger import Author, Entry, Ledger  # noqa: E402
from trainer.model import load_model  # noqa: E402
from trainer.setup import make_gateway  # noqa: E402
from trainer.storage.run_files import METRICS_FILE, read_metrics  # noqa: E402
from trainer.template import Template  # noqa: E402
from trainer.train.job import load_tasks  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
ROLES = r"(?:system|user|assistant)\n"


@dataclass(frozen=True, slots=True)
class Game:
    """A game; its job has the same name."""

    python: str
    """The folder of the environment of Python that has it."""
    moves: Sequence[str]
    pieces: str
    """A pattern of what is tokenized alone, besides roles. Everything between may become one token."""
    played: int = 320
    """Games that are played at random."""
    won: bool = False
    """Whether the model is shown only those that were won."""
    repeats: bool = False
    """Whether a move may be made twice."""


@dataclass(frozen=True, slots=True)
class RealStart:
    """How SmolLM2 begins a game."""

    changes: Sequence[str]
    """Changes of the job, besides those of all."""
    shown: str = ""
    """Which rollouts of a tiny model's run it is shown; if empty, last moves of games at random that were won."""
    shown_steps: int = 0
    """Training steps on them."""


GAMES: Mapping[str, Game] = {
    "bandit": Game(".gym-peers", ("a", "b", "c", "d"), r"[\d.]", 10_000, won=True, repeats=True),
    "guess": Game(".environments/textarena", [f"[{number}]" for number in range(1, 21)], r"\[\w+\]"),
    "lake": Game(
        ".gym-peers", ("left", "down", "right", "up"), r"[SFHG](?=[SFHG\[\n]|\z)|\[\w\]", 10_000, won=True, repeats=True
    ),
}
REAL_STARTS: Mapping[str, RealStart] = {
    "bandit": RealStart(
        ("steps=12", "limits.rollout_tokens=512"), "step > 8 and invalid == 0 and reward > 100 and reward < 172", 80
    ),
    "guess": RealStart(("steps=25", "limits={turn_tokens: 16, rollout_tokens: 640}")),
    "lake": RealStart(("steps=40", "limits.rollout_tokens=768"), "reward >= 1 and step > 40 and invalid == 0", 60),
}
SEEDS = (0, 1, 2)
TOKENIZED = 60
"""Further games, with moves against the rules, whose answers have to have tokens, too."""
WARM_STEPS = 400
"""Steps on games that were played at random."""
LR = 2e-3
SMOLLM2 = ("prompts=8", "update.lr=2e-5", "update.warmup_steps=2")
"""Changes of all jobs for SmolLM2."""
ON_CPU = ("update.micro_batch_tokens=1024", "update.dtype=bfloat16")
"""Changes of these jobs, and of what it is shown, for a CPU."""
LAST_MOVES = 320
"""Games that were won, of which it is shown the last move."""
LAST_MOVES_LR, GAMES_LR = 1e-4, 2e-4
"""Learning rates meanwhile."""
GAMES_BATCH = 4
"""With 16 games a step, the same number of games taught hardly anything."""


async def play_at_random(
    settings: TrainSettings, moves: Sequence[str], seed: int, count: int, *, repeats: bool = False, won: bool = False
) -> list[Chat]:
    """Chats of games as the policy reads them, in which it makes no move twice, unless it `repeats` them; all, or those
    that were won."""
    tasks, chats = cycle(load_tasks(settings).train[None]), []
    async with make_gateway(settings) as gateway:
        for number, task in enumerate(islice(tasks, count)):
            async with gateway.open(Task(str(number))) as session:
                result = await session.call(reset_call(*read_episode(task)), LOOP)
                chat = [*add_observation(task.messages, chat_content(result.parts))]
                draw, reward = Random(f"{seed}/{number}"), 0.0
                for move in draw.choices(moves, k=99) if repeats else draw.sample(moves, len(moves)):
                    chat.append({"role": "assistant", "content": move})
                    result = await session.call(text_call(move, len(chat)), LOOP)
                    reward += result.reward or 0.0
                    if result.done:
                        break
                    chat.append({"role": "user", "content": chat_content(result.parts)})
                if reward >= settings.reward.success_at or not won:
                    chats.append([dict(message) for message in chat])
    return chats


def build_model(folder: Path, chats: Sequence[Chat], pieces: str, seed: int) -> Path:
    """A tiny model with random weights, whose tokens are those of these chats."""

    def texts(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
        for chat in chats:
            yield str(tokenizer.apply_chat_template(chat, tokenize=False))

    return save_model(folder, train_tokenizer(SPECIAL_TOKENS, CHAT_TEMPLATE, texts, f"{ROLES}|{pieces}"), seed)


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


def teach_tiny(folder: Path, chats: Sequence[Chat]) -> None:
    """Trains the model in a folder on the policy's turns of these chats."""
    model, writer = load_model(folder), ChatWriter(Template.load(folder), ())
    setup = WarmStartSetup(writer, lambda _seed, _kinds: cycle(cast("Any", chats)))
    warm_start(model, setup, Recipe(skill_steps=WARM_STEPS, habit_steps=0))
    model.save_pretrained(folder)


def start_tiny(game: Game, settings: TrainSettings, steps: int | None, folder: Path) -> tuple[Path, float]:
    """A tiny model that learned from games played at random, and the core-seconds which that took."""
    play, seed = partial(play_at_random, settings, game.moves, settings.seed), settings.seed
    count = game.played if steps is None else game.played // 4
    chats = anyio.run(partial(play, count, repeats=game.repeats, won=game.won))
    against_the_rules = anyio.run(partial(play, TOKENIZED, repeats=True))
    model = build_model(folder / "model", [*chats, *against_the_rules], game.pieces, seed)
    warm = time.process_time()
    teach_tiny(model, chats)
    return model, time.process_time() - warm


def show_last_moves(game: Game, settings: TrainSettings, steps: int | None, folder: Path) -> tuple[Path, float]:
    """SmolLM2 after it was shown the last moves of games at random, and the core-seconds which that took."""
    shown = LAST_MOVES if steps is None else LAST_MOVES // 10
    won = anyio.run(partial(play_at_random, settings, game.moves, settings.seed, 3 * shown, won=True))
    last = ("algorithm.credit.trained_turns=last", "update.dtype=bfloat16")
    return learn_chats(folder, fetch_model(print), won[:shown], LAST_MOVES_LR, *last)


def show_games(name: str, seed: int, steps: int | None, folder: Path) -> tuple[Path, float]:
    """SmolLM2 after it was shown games of a tiny model that learned the game, and the core-seconds of both."""
    tiny, run = folder / "tiny", folder / "shown"
    tiny.mkdir()
    learned = train_seed(name, steps, False, seed, tiny)
    start = REAL_STARTS[name]
    given = ["sft", "--from", str(tiny / "run"), "--where", start.shown if steps is None else "invalid == 0"]
    given += ["--model", str(fetch_model(print)), "--steps", str(steps or start.shown_steps)]
    given += ["--batch", str(GAMES_BATCH)]
    given += ["--lr", str(GAMES_LR), "--seed", str(seed), "--out", str(run), *ON_CPU]
    given += ["update.warmup_steps=3", "update.lr_scheduler=linear", "checkpoint.every=1000"]
    _, core_s = run_command(given, folder, threads=THREADS)
    return max((run / "checkpoints").iterdir()), core_s + learned["warm_core_s"] + learned["grpo_core_s"]


def train_seed(name: str, steps: int | None, smollm2: bool, seed: int, folder: Path) -> dict[str, Any]:
    """The model that learned from games played at random, and what the job makes of it."""
    game, job = GAMES[name], JOBS / f"{name}.yaml"
    python, threads = ROOT / game.python / "bin" / "python", THREADS if smollm2 else 1
    changes = [f"environment.python={python}", f"seed={seed}", "evaluation.after=false"]
    changes += [*SMOLLM2, *ON_CPU, *REAL_STARTS[name].changes] if smollm2 else [f"update.lr={LR}"]
    settings = load_settings(TrainSettings, job, {}, overrides=changes)
    if smollm2 and REAL_STARTS[name].shown:
        model, warm = show_games(name, seed, steps, folder)
    else:
        model, warm = (show_last_moves if smollm2 else start_tiny)(game, settings, steps, folder)
    run = folder / "run"
    fewer = [] if steps is None else [f"steps={steps}", "prompts=2", "evaluation.rows=4", "evaluation.final_rows=4"]
    given = ["--config", str(job), "--model", str(model), "--out", str(run), *changes, *fewer]
    _, grpo = run_command(given, folder, threads=threads)
    output, _ = run_command(["eval", str(run), "--json"], folder, threads=threads)
    curve = [
        round(step["success/sampled"], 4) for step in read_metrics(run / METRICS_FILE) if "success/sampled" in step
    ]
    return {
        "seed": seed, "warm_core_s": round(warm, 1), "grpo_core_s": round(grpo, 1),
        "compared": json.loads(output), "curve": curve,
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--game", choices=GAMES, nargs="+", help="default: all")
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options.add_argument("--smollm2", action="store_true", help="by a real model")
    options.add_argument("--steps", type=int, help="a small part, of so many steps")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    out, seeds = args.out or (RESULTS if args.steps is None else None), f"--seeds {' '.join(map(str, args.seeds))}"
    for game in args.game or GAMES:
        about = describe_environment("shell", THREADS if args.smollm2 else 1) | {
            "job": f"`python bench/games.py {'--smollm2 ' if args.smollm2 else ''}--game {game} {seeds}`",
            "core-s": "of the warm start, a tiny model's without imports; of the run, with its children and imports",
        }
        result = f"smollm2-{game}" if args.smollm2 else game
        train_seeds(result, args.seeds, partial(train_seed, game, args.steps, args.smollm2), about, out)


if __name__ == "__main__":
    main()
