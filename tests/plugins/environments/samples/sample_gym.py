"""Environments of Gymnasium for tests: they echo actions, draw pictures, break, hang and die. Runs with its Python."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import gymnasium
import numpy
from gymnasium import spaces

SPACES = {
    "discrete": spaces.Discrete(3, start=2),
    "box": spaces.Box(-1.0, 1.0, (2,)),
    "whole_box": spaces.Box(0, 9, (2, 2), dtype=numpy.int64),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "text": spaces.Text(5, charset="ab-]^"),
    "dict": spaces.Dict({"move": spaces.Discrete(2), "force": spaces.Box(0.0, 1.0, ())}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Text(3))),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "one_of": spaces.OneOf((spaces.Discrete(2), spaces.Text(3))),
    "graph": spaces.Graph(spaces.Discrete(2), None),
}


class Echo(gymnasium.Env):
    """Answers with the action that it was given; ends after three steps."""

    def __init__(self, space: str = "discrete", trouble: str = "") -> None:
        self.action_space, self.observation_space = SPACES[space], spaces.Text(1000)
        self.trouble = trouble

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        if self.trouble == "raise in reset":
            raise OSError("no such world")
        if self.trouble == "hang in reset":
            threading.Event().wait()
        return f"{self.np_random.integers(1000)} {options}", {}

    def step(self, action):
        self.steps += 1
        if self.trouble == "raise":
            raise ValueError("the physics exploded")
        if self.trouble == "die":
            os._exit(3)
        if self.trouble == "hang":
            threading.Event().wait()
        if self.trouble == "print":
            sys.stdout.write('{"id": 2, "ok": {}}\n')
            sys.stdout.flush()
            os.write(1, b"not a line of JSON")
            subprocess.run(["sh", "-c", "echo noise; cat"], check=True)
        if self.trouble == "refuse":
            raise gymnasium.error.InvalidAction("that square is taken")
        if self.trouble == "huge":
            return "x" * (2**20 + 7), 0.0, False, False, {}
        if self.trouble == "far too huge":
            return "x" * (65 * 2**20), 0.0, False, False, {}
        if self.trouble == "nan":
            return "", float("nan"), False, False, {}
        return repr(action), 0.5, self.steps == 3, False, {}


class Pixels(gymnasium.Env):
    """A picture as an observation, and another one as what is rendered."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict({"eye": spaces.Box(0, 255, (8, 9, 3), numpy.uint8), "speed": spaces.Box(0, 1, ())})

    def __init__(self, render_mode=None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(0), {}

    def step(self, action):
        return self._look(255 * int(action)), float(action), False, bool(action), {}

    def render(self):
        return numpy.full((10, 12, 3), 7, numpy.uint8)

    def _look(self, value: int):
        return {"eye": numpy.full((8, 9, 3), value, numpy.uint8), "speed": numpy.float32(1 / 3)}


class Grey(Echo):
    """Shows pictures without channels."""

    def step(self, action):
        return numpy.zeros((32, 40), numpy.uint8), 0.0, False, False, {}


gymnasium.register("Grey-v0", Grey, disable_env_checker=True)
gymnasium.register("Echo-v0", Echo, disable_env_checker=True, order_enforce=False)
gymnasium.register("Pixels-v0", Pixels, disable_env_checker=True)
