"""Tests reward functions written for ms-swift, with ms-swift's arguments, and its loss scales as token weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import TASK, run_scheduler
from tests.trainer.cli_data import RunCommand
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES
from trainer.algorithms.token_weights import bind_decoder, compute_token_weights, excluded_tokens, load_token_weight_fn
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.scorer import Scorer
from trainer.reward.settings import RewardSettings

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
        name: {"function": "mtrl_plugins.swift.orm:named", "batched": True, "args": {"name": name, **args}}
        for name in names
    }
    return Scorer(RewardSettings(components=components), decoder=make_template(HERMES))


async def test_group_is_scored_at_once_with_ms_swifts_columns(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    one = await run_scheduler(f"{file}:Again", ["8", "7"], max_turns=2)
    other = replace(await run_scheduler(f"{file}:Again", ["8", "9"], max_turns=2), index=1)
    group = await scorer(file, "solves", "tries", "one", soft_max_length=0, max_steps=9).score(TASK, [one, other])
    assert not group.failed
    assert [dict(each.components) for each in group.scored] == [
        {"solves": 1.0, "tries": 0.0, "one": 1.0},
        {"solves": 0.0, "tries": 0.0, "one": 1.0},
    ]
    with open("seen.json") as text:  # noqa: ASYNC230
        arguments = json.load(text)
    assert arguments["completions"] == ["7", "9"] and arguments["solution"] == ["7", "7"]
    assert [message["role"] for message in arguments["messages"][0]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert arguments["is_truncated"] == [False, False] and arguments["trainer_state"] == {
        "global_step": 0,
        "max_steps": 9,
    }
    assert arguments["rollout_infos"] == arguments["multi_turn_infos"] == [{"tries": 1, "num_turns": 2}] * 2
    for name, chat in zip(arguments["request_id"], arguments["messages"], strict=True):
        ((row),) = arguments["trajectory_inputs"][name]
        assert (row["messages"], row["solution"], row["rollout_infos"]["tries"]) == (chat, "7", 1)
    assert [len(ids) for ids in arguments["response_token_ids"]] == [sum(len(turn.ids) for turn in one.turns)] * 2


async def test_masked_turn_has_zero_weight_with_any_weight_function(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    rollout = await run_scheduler(f"{file}:Again", ["8", "7"], max_turns=2)
    first, last = rollout.turns
    weights = compute_token_weights(rollout.ledger, load_token_weight_fn("all"), "r")
    assert sum(weights) == len(last.ids) and sum(excluded_tokens(rollout.ledger)) == len(first.ids)
    assert all(not weight or is_policy for weight, is_policy in zip(weights, rollout.ledger.mask, strict=True))


def test_unregistered_function_is_reported_before_the_run(write: Write) -> None:
    file = write("plugin.py", PLUGIN)
    with pytest.raises(ConfigError, match="unknown reward function 'solve'") as caught:
        scorer(file, "solve")
    assert "did you mean 'solves'" in str(caught.value) and str(file) in str(caught.value)


def test_builtin_functions_are_registered_and_score(write: Write) -> None:
    from mtrl_plugins.swift.orm import build_arguments, orms

    said = ["<think>a</think> <answer>b</answer>", "<answer>b</answer>", "so so so so"]
    assert orms["format"]()(completions=said) == [1.0, 0.0, 0.0]
    assert orms["repetition"](build_arguments({}))(completions=said)[2] == -0.5
    soft_overlong = orms["soft_overlong"](build_arguments({"soft_max_length": 10, "soft_cache_length": 4}))
    assert soft_overlong(response_token_ids=[[0] * 6, [0] * 8, [0] * 10]) == [0.0, -0.5, -1.0]


def entry(author: Author, text: str, *roles: str) -> Entry:
    ids = make_template(HERMES).tokenizer.encode(text)
    messages = tuple({"role": role, "content": text} for role in roles)
    return Entry(author, ids, messages, logprobs=(0.0,) * len(ids) if author is Author.POLICY else None)


def test_last_round_is_everything_after_the_last_user_message() -> None:
    ledger = Ledger((
        entry(Author.TASK, "go", "user"), entry(Author.POLICY, "one", "assistant"),
        entry(Author.FEEDBACK, "on", "user"), entry(Author.POLICY, "two"),
        entry(Author.FEEDBACK, "but wait"), entry(Author.POLICY, "three", "assistant"),
    ))  # fmt: skip
    weights = compute_token_weights(ledger, load_token_weight_fn("mtrl_plugins.swift.loss_scale:last_round"), "r")
    by_entry = [set(weights[start : start + len(one.ids)]) for start, one in zip(ledger.starts, ledger, strict=True)]
    assert by_entry == [{0.0}, {0.0}, {0.0}, {1.0}, {0.0}, {1.0}]


def test_only_empty_thinking_has_zero_weight() -> None:
    decode = make_template(HERMES).decode_turn
    weight_fn = bind_decoder(load_token_weight_fn("mtrl_plugins.swift.loss_scale:default_ignore_empty_think"), decode)
    empty, full = entry(Author.POLICY, "<think>\n\n</think>\n\nyes"), entry(Author.POLICY, "<think>x</think>yes")
    weights = compute_token_weights(Ledger((empty, full)), weight_fn, "r")
    trained_ids = [id for id, weight in zip((*empty.ids, *full.ids), weights, strict=True) if weight]
    assert decode(trained_ids) == "yes<think>x</think>yes"


JUDGE = """\
    from swift.plugin import ORM

    class Judge(ORM):
        def __call__(self, attempt):
            return 1.0

    judge = Judge()
"""


def test_reward_function_of_run_file_may_import_ms_swift(run: RunCommand, model: Path, place: Path) -> None:
    (place / "judging.py").write_text(dedent(JUDGE))
    (place / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "Say one."}], "solution": "one"}\n')
    components = {"judge": {"function": "judging.py:judge"}}
    settings = {"model": str(model), "data": "rows.jsonl", "tools": []}
    (place / "judged.yaml").write_text(json.dumps(settings | {"reward": {"components": components}}))
    assert "judge" in run("--config", "judged.yaml", "--dry-run", "--engine", "torch").output
