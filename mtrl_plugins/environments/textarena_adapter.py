"""The adapter of TextArena in a host process: the policy has one seat of a game, opponents have the others.

Runs with the Python that has `textarena`.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import random
import re
import sys
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.process.child_entry import load_file

if TYPE_CHECKING:
    from mtrl_plugins.environments.host_server import GlobalRandom, HostError, import_framework
else:
    from host_server import GlobalRandom, HostError, import_framework

MAX_PLAYERS = 15
"""The most players that are tried to find the fewest that a game takes."""
MAX_MOVES = 1000
"""Moves of opponents in a row, after which a game is given up: it never asks the policy."""
OPPONENT_S = 60.0
"""How long a model that plays an opponent may take for a move."""
MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
ROLES = re.compile(r"\[(GAME|Player ?\d*)\]")
MISSING = re.compile(r"No module named '(\w+)")
KEY = re.compile(r"\b[A-Z_]+_API_KEY\b")
SYNTAX = (3, 12)
"""The Python whose f-strings some games use."""
Opponent = Callable[[str], str]

TOOL = {
    "name": "step",
    "description": "Makes a move in the game, and returns what happens.",
    "parameters": {
        "type": "object",
        "properties": {"action": {"type": "string", "description": "The move, as the game's rules write it."}},
        "required": ["action"],
        "additionalProperties": False,
    },
}


def load(environment: str, args: dict[str, Any], endpoint: object) -> TextArenaAdapter:
    """The game with this id."""
    return TextArenaAdapter(import_framework("textarena"), environment, args)


class TextArenaAdapter:
    """One game, with the number of its players and their opponents."""

    uses_global_random = True

    def __init__(self, textarena: Any, environment: str, args: Mapping[str, Any]) -> None:
        self.textarena, self.environment, self.args = textarena, environment, dict(args["make"])
        self.player = int(args["player"])
        self.make_opponent = _opponent_maker(args["opponent"])
        self.players = self._find_players(args["players"])
        if self.player >= self.players:
            problem = f"the game has {self.players} players, so there is no seat {self.player}"
            raise HostError(problem, "correct `environment.player`, or set `environment.players`")

    def about(self) -> dict[str, Any]:
        """The release, the tool and the number of players."""
        return {"framework": f"textarena {version('textarena')}", "tools": [TOOL], "players": self.players}

    def make(self, options: Mapping[str, Any]) -> TextArenaEpisode:
        """A new game; `options` may change its arguments and the policy's seat."""
        player = int(options.get("player", self.player)) % self.players
        return TextArenaEpisode(self._make(options.get("args") or {}), self.players, player, self.make_opponent)

    def _make(self, args: Mapping[str, Any]) -> Any:
        try:
            return self.textarena.make(self.environment, **{**self.args, **args})
        except (ValueError, TypeError, ImportError, LookupError, OSError, SyntaxError) as error:
            problem = f"{self.environment!r} cannot be made: {str(error).strip()[:400]}"
            if _needs_newer(error):
                found = f"{sys.executable} is {platform.python_version()}"
                problem = f"{self.environment!r} needs Python 3.12 or later, and {found}"
            raise HostError(problem, _remedy(error)) from error

    def _find_players(self, given: int | None) -> int:
        """The given number of players, or the fewest that the game takes: it refuses others as it begins."""
        causes: dict[str, None] = {}
        for players in (given,) if given else range(1, MAX_PLAYERS + 1):
            try:
                self._make({}).reset(num_players=players, seed=0)
                return players
            except (AssertionError, IndexError, KeyError, ValueError, TypeError) as error:
                causes[str(error)] = None
        wanted = f"{given} players" if given else f"any number of players up to {MAX_PLAYERS}"
        problem = f"{self.environment!r} does not begin with {wanted}: {'; '.join(causes)[:400]}"
        raise HostError(problem, "correct `environment.players` or `environment.args`, or leave them out")


def _needs_newer(error: Exception) -> bool:
    """Whether a later Python reads the game's f-strings."""
    return isinstance(error, SyntaxError) and sys.version_info < SYNTAX and "f-string" in str(error)


def _remedy(error: Exception) -> str:
    """What to do about a game that cannot be made."""
    missing = MISSING.search(str(error)) if isinstance(error, ImportError) else None
    if _needs_newer(error):
        return "install textarena for Python 3.12 or later, and name that Python as `environment.python`"
    if missing is not None and missing[1] != "textarena":
        return f"install {missing[1]} beside textarena: {sys.executable} -m pip install {missing[1]}"
    if isinstance(error, ImportError | SyntaxError | FileNotFoundError):
        return "this release of TextArena has no such game that works: choose another one"
    if key := KEY.search(str(error)):
        return f"set {key[0]} where the run starts, or choose another game"
    return "correct the name, or `environment.args`; some games fetch word lists once, which needs a network"


class TextArenaEpisode:
    """One game. The policy sees what is new since its last move."""

    def __init__(self, game: Any, players: int, player: int, make_opponent: Callable[[int], Opponent]) -> None:
        self.game, self.players, self.player = game, players, player
        self.make_opponent = make_opponent
        self.opponents: dict[int, Opponent] = {}
        self.seen = ""
        self.is_over = False

    def reset(self, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Begins the game; opponents before the policy move."""
        self.opponents = {seat: self.make_opponent(seed + seat) for seat in range(self.players) if seat != self.player}
        self.game.reset(num_players=self.players, seed=seed)
        return self._play_on(done=False)

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """The policy's move, and those of its opponents until it is asked again."""
        done, _ = self.game.step(action=str(action["text"] if "text" in action else action["action"]).strip())
        return self._play_on(done)

    def close(self) -> None:
        """Ends the game."""
        if not self.is_over:
            self.is_over = True
            self.game.close()

    def _play_on(self, done: bool) -> dict[str, Any]:
        for _ in range(MAX_MOVES):
            if done:
                return self._end()
            seat, observation = self.game.get_observation()
            if seat == self.player:
                return {"parts": [{"type": "text", "text": self._read_new(_to_text(observation))}]}
            done, _ = self.game.step(action=self.opponents[seat](_to_text(observation)))
        raise HostError(f"the game has not asked the policy within {MAX_MOVES} moves of its opponents")

    def _read_new(self, text: str) -> str:
        """The part of an observation that the policy has not read: most games show all that was ever written."""
        new = text[len(self.seen) :] if text.startswith(self.seen) else text
        self.seen = text
        return new.strip("\n")

    def _end(self) -> dict[str, Any]:
        self.is_over = True
        rewards, infos = self.game.close()
        info = (infos or {}).get(self.player) or {}
        reward = float((rewards or {}).get(self.player, 0.0))
        reason = str(info.get("reason") or "The game is over.")
        return {"parts": [{"type": "text", "text": reason}], "reward": reward, "terminated": True, "truncated": False}


def _to_text(observation: Any) -> str:
    """An observation as text; games without a wrapper that writes it send messages with their senders."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message[1]) for message in observation or ())


def _opponent_maker(opponent: Any) -> Callable[[int], Opponent]:
    """What makes the opponent of a seat in an episode, from its seed."""
    if opponent == "random":
        return RandomOpponent
    if isinstance(opponent, list | tuple):
        return lambda seed: ScriptedOpponent(list(opponent))
    if isinstance(opponent, Mapping):
        if not {"url", "model"} <= opponent.keys():
            raise HostError("`opponent` has no url or no model", "write `{url: http://host/v1, model: NAME}`")
        return lambda seed: ModelOpponent(dict(opponent), seed)
    file, colon, name = str(opponent).rpartition(":")
    if not colon:
        problem = f"`opponent` is {opponent!r}"
        raise HostError(problem, "write `random`, a list of texts, `file.py:name`, or `{url: ..., model: ...}`")
    return _load_opponent(file, name)


def _load_opponent(file: str, name: str) -> Callable[[int], Opponent]:
    try:
        module = load_file("textarena_opponent", Path(file)) if file.endswith(".py") else importlib.import_module(file)
        found = getattr(module, name)
    except (OSError, ImportError, AttributeError) as error:
        raise HostError(
            f"the opponent {file}:{name} cannot be loaded: {error}", "correct `environment.opponent`"
        ) from error
    return lambda seed: found() if isinstance(found, type) else found


class RandomOpponent:
    """Picks one of the moves in brackets that the observation shows in one line, as late as possible."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a game

    def __call__(self, observation: str) -> str:
        for least in (2, 1):
            for line in reversed(observation.splitlines()):
                moves = [move for move in MOVE.findall(line) if not ROLES.fullmatch(move)]
                if len(moves) >= least:
                    return str(self._random.choice(moves))
        return "[pass]"


class ScriptedOpponent:
    """Plays a list of moves, from the start again when it is over."""

    def __init__(self, moves: list[str]) -> None:
        self._moves, self._next = moves or ["[pass]"], 0

    def __call__(self, observation: str) -> str:
        self._next += 1
        return self._moves[(self._next - 1) % len(self._moves)]


class ModelOpponent:
    """Asks an OpenAI-compatible server for each move."""

    def __init__(self, settings: Mapping[str, Any], seed: int) -> None:
        self._settings, self._seed = settings, seed

    def __call__(self, observation: str) -> str:
        settings = self._settings
        body = {"model": settings["model"], "messages": [{"role": "user", "content": observation}], "seed": self._seed}
        token = os.environ.get(settings.get("token_variable") or "", "none")
        request = urllib.request.Request(  # noqa: S310 - the operator's own server
            f"{settings['url'].rstrip('/')}/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {token}"},
        )
        with GlobalRandom.waiting(), urllib.request.urlopen(request, timeout=OPPONENT_S) as response:  # noqa: S310
            answer = json.loads(response.read(2**22))
        return str(answer["choices"][0]["message"]["content"] or "")
