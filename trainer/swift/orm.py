"""A reward function of ms-swift's is an object that is called with all completions, and gives a number for each."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from gateway.errors import ConfigError


class ORM:
    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} has no `__call__`")


class AsyncORM:
    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    async def __call__(self, **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} has no `__call__`")


class Format(ORM):
    """1 for thinking, and then an answer, in tags, and nothing else."""

    shape = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>\Z", re.DOTALL)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [float(bool(self.shape.match(text))) for text in completions]


class ReActFormat(Format):
    """1 for thinking, and then an action and what it is given."""

    shape = re.compile(r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE)


class SoftOverlong(ORM):
    """0 up to `soft_max_length - soft_cache_length` of the policy's tokens, and from there down to -1 and below."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.most, self.margin = int(args.soft_max_length), int(args.soft_cache_length)
        if not 0 < self.margin < self.most:
            raise ValueError(f"soft_cache_length ({self.margin}) does not lie within soft_max_length ({self.most})")

    def __call__(self, response_token_ids: list[list[int]], **kwargs: Any) -> list[float]:  # type: ignore[override]
        begin = self.most - self.margin
        return [min(0.0, (begin - len(ids)) / self.margin) for ids in response_token_ids]


class RepetitionPenalty(ORM):
    """The share of runs of `repetition_n_grams` words that came before, times `repetition_max_penalty`."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.wide, self.most = int(args.repetition_n_grams), float(args.repetition_max_penalty)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [self._cost(text.lower().split()) for text in completions]

    def _cost(self, words: list[str]) -> float:
        runs = [tuple(words[at : at + self.wide]) for at in range(len(words) - self.wide + 1)]
        return (1 - len(set(runs)) / len(runs)) * self.most if runs else 0.0


class MathAccuracy(ORM):
    """1 where the answer is the solution by the rules of `math_verify`, which whoever wants them installs."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        try:
            rules = import_module("math_verify")
        except ImportError as error:
            remedy = "run `pip install math-verify`, or name a reward function of your own"
            raise ConfigError("`accuracy` compares by math_verify, which is not installed", remedy=remedy) from error
        self._parse, self._verify = rules.parse, rules.verify

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [self._right(text, truth) for text, truth in zip(completions, solution, strict=True)]

    def _right(self, text: str, truth: str) -> float:
        said, right = (
            self._parse(_answer(one), extraction_mode="first_match", parsing_timeout=None) for one in (text, truth)
        )
        return float(bool(right) and bool(self._verify(right, said, timeout_seconds=None)))


def _answer(text: str) -> str:
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[1].strip() if found else text


orms: dict[str, Any] = {
    "accuracy": MathAccuracy,
    "format": Format,
    "react_format": ReActFormat,
    "repetition": RepetitionPenalty,
    "soft_overlong": SoftOverlong,
}
