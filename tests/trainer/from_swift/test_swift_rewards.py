"""Reward functions written for ms-swift are given what its documents promise; its loss scales are weights of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.trainer.conversations import template_for
from tests.trainer.from_swift.swift_playing import TASK, played
from tests.trainer.scripts import HERMES
from trainer.learn.rounds import left_out, reading, weigh_of, weights
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.scorer import Scorer
from trainer.reward.settings import RewardSettings

pytestmark = pytest.mark.anyio

PLUGIN = """
    import json
    from typing import List
    from swift.plugin import ORM, orms, rm_plugins
    from swift.plugin.multi_turn import MultiTurnScheduler
    from swift.rewards import AsyncORM

    class Again(MultiTurnScheduler):
        def step(self, infer_request, result, current_turn):
            infer_request.messages.append({'role': 'user', 'content': 'Again.'})
            ids = result.token_ids
            return {'infer_request': infer_request, 'rollout_infos': {'tries': current_turn},
                    'response_token_ids': ids, 'response_loss_mask': [0] * len(ids)}

    class Solves(ORM):
        def __call__(self, completions, solution, **kwargs) -> List[float]:
            kwargs['trainer_state'] = vars(kwargs['trainer_state'])
            with open('seen.json', 'w') as file:
                json.dump({'completions': completions, 'solution': solution, **kwargs}, file)
            return [float(truth in said) for said, truth in zip(completions, solution)]

    class Tries(AsyncORM):
        def __init__(self, args=None, **kwargs):
            self.most = args.soft_max_length

        async def __call__(self, completions, **kwargs):
            return [None if infos['tries'] > self.most else 0.5 for infos in kwargs['multi_turn_infos']]

    class Breaks(ORM):
        def __call__(self, completions, **kwargs):
            return completions[0]['nothing']

    orms['solves'] = Solves
    orms['tries'] = Tries
    orms['breaks'] = Breaks
    orms['one'] = lambda completions, **kwargs: [1.0 for _ in completions]
"""


def scorer(file: Path, *names: str, **options: Any) -> Scorer:
    args = {"plugins": [str(file)], "options": options}
    components: Any = {
        name: {"function": "trainer.swift.reward:named", "batched": True, "args": {"name": name, **args}}
        for name in names
    }
    return Scorer(RewardSettings(components=components))


async def test_a_group_is_scored_at_once_with_columns_chats_and_what_the_scheduler_said(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    one = await played(f"{file}:Again", ["8", "7"], max_turns=2)
    other = replace(await played(f"{file}:Again", ["8", "9"], max_turns=2), index=1)
    found = await scorer(file, "solves", "tries", "one", soft_max_length=0, max_steps=9).score(TASK, [one, other])
    assert not found.failed
    assert [dict(each.components) for each in found.scored] == [
        {"solves": 1.0, "tries": 0.0, "one": 1.0},
        {"solves": 0.0, "tries": 0.0, "one": 1.0},
    ]
    with open("seen.json") as text:  # noqa: ASYNC230
        seen = json.load(text)
    assert seen["completions"] == ["7", "9"] and seen["solution"] == ["7", "7"]
    assert [message["role"] for message in seen["messages"][0]] == ["system", "user", "assistant", "user", "assistant"]
    assert seen["is_truncated"] == [False, False] and seen["trainer_state"] == {"global_step": 0, "max_steps": 9}
    assert seen["rollout_infos"] == seen["multi_turn_infos"] == [{"tries": 1, "num_turns": 2}] * 2
    for name, chat in zip(seen["request_id"], seen["messages"], strict=True):
        ((row),) = seen["trajectory_inputs"][name]
        assert (row["messages"], row["solution"], row["rollout_infos"]["tries"]) == (chat, "7", 1)
    assert [len(ids) for ids in seen["response_token_ids"]] == [sum(len(turn.ids) for turn in one.turns)] * 2


async def test_a_masked_turn_has_no_weight_whatever_weighs_the_tokens(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    rollout = await played(f"{file}:Again", ["8", "7"], max_turns=2)
    first, last = rollout.turns
    given = weights(rollout.ledger, weigh_of("all"), "r")
    assert sum(given) == len(last.ids) and sum(left_out(rollout.ledger)) == len(first.ids)
    assert all(not weight or mine for weight, mine in zip(given, rollout.ledger.mask, strict=True))


async def test_a_function_that_breaks_costs_its_rollouts_and_is_told_with_its_line(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    rollout = await played(f"{file}:Again", ["7"], max_turns=1)
    found = await scorer(file, "breaks").score(TASK, [rollout])
    line = file.read_text().splitlines().index("        return completions[0]['nothing']") + 1
    assert f"{file}:{line}" in found.failed[0].reason and "TypeError" in found.failed[0].reason


def test_a_name_that_nobody_registers_is_told_before_anything_starts(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    with pytest.raises(ConfigError, match="registers no reward function 'solve'") as caught:
        scorer(file, "solve")
    assert "did you mean 'solves'" in str(caught.value) and str(file) in str(caught.value)


def test_shipped_functions_are_asked_by_their_names(write: Write) -> None:
    from trainer.swift.orm import orms
    from trainer.swift.plugins import arguments

    said = ["<think>a</think> <answer>b</answer>", "<answer>b</answer>", "so so so so"]
    assert orms["format"]()(completions=said) == [1.0, 0.0, 0.0]
    assert orms["repetition"](arguments({}))(completions=said)[2] == -0.5
    long = orms["soft_overlong"](arguments({"soft_max_length": 10, "soft_cache_length": 4}))
    assert long(response_token_ids=[[0] * 6, [0] * 8, [0] * 10]) == [0.0, -0.5, -1.0]


def entry(author: Author, text: str, *roles: str) -> Entry:
    ids = template_for(HERMES).tokens.encode(text)
    messages = tuple({"role": role, "content": text} for role in roles)
    return Entry(author, ids, messages, logprobs=(0.0,) * len(ids) if author is Author.POLICY else None)


def test_the_last_round_is_all_that_was_written_after_the_user_spoke() -> None:
    ledger = Ledger((
        entry(Author.TASK, "go", "user"), entry(Author.POLICY, "one", "assistant"),
        entry(Author.FEEDBACK, "on", "user"), entry(Author.POLICY, "two"),
        entry(Author.FEEDBACK, "but wait"), entry(Author.POLICY, "three", "assistant"),
    ))  # fmt: skip
    given = weights(ledger, weigh_of("trainer.swift.scales:last_round"), "r")
    by_entry = [set(given[start : start + len(one.ids)]) for start, one in zip(ledger.starts, ledger, strict=True)]
    assert by_entry == [{0.0}, {0.0}, {0.0}, {1.0}, {0.0}, {1.0}]


def test_an_empty_thought_has_no_weight_and_a_full_one_has() -> None:
    words = template_for(HERMES).words
    weigh = reading(weigh_of("trainer.swift.scales:default_ignore_empty_think"), words)
    empty, full = entry(Author.POLICY, "<think>\n\n</think>\n\nyes"), entry(Author.POLICY, "<think>x</think>yes")
    given = weights(Ledger((empty, full)), weigh, "r")
    learned = [id for id, weight in zip((*empty.ids, *full.ids), given, strict=True) if weight]
    assert words(learned) == "yes<think>x</think>yes"
