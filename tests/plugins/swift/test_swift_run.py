"""Tests training with a script, plug-in file and rows written for ms-swift, without ms-swift installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from textwrap import dedent

from tests.trainer.cli_data import RunCommand
from trainer.rollout.rollout import EXCLUDED_SPANS, StopReason
from trainer.storage.rollout_file import Rollouts
from trainer.train.run_folder import load_run_settings

PLUGIN = """
    from swift.plugin import ORM, orms, multi_turns
    from swift.plugin.multi_turn import MultiTurnScheduler

    class Again(MultiTurnScheduler):
        def step(self, infer_request, result, current_turn):
            assert infer_request.data_dict['solution']
            infer_request.messages.append({'role': 'user', 'content': 'Again.'})
            ids = result.token_ids
            return {'infer_request': infer_request, 'rollout_infos': {'tries': current_turn},
                    'response_token_ids': ids, 'response_loss_mask': [0] + [1] * (len(ids) - 1)}

    class Length(ORM):
        def __call__(self, completions, solution, rollout_infos, **kwargs):
            from swift.utils import get_logger
            assert all(infos['num_turns'] <= 2 for infos in rollout_infos)
            return [float(len(text)) for text in completions]

    multi_turns['again'] = Again
    orms['length'] = Length
"""
SCRIPT = """\
    swift rlhf --rlhf_type grpo --model MODEL --tuner_type full --dataset rows.jsonl --split_dataset_ratio 0 \\
        --external_plugins plugin.py --multi_turn_scheduler again --max_turns 2 --reward_funcs length \\
        --num_generations 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 \\
        --max_completion_length 12 --vllm_max_model_len 400 --max_steps 1 --learning_rate 1e-4 \\
        --lr_scheduler_type constant --beta 0 --gradient_checkpointing false --output_dir runs/moved \\
        --loss_scale default --log_completions true
"""


def rows() -> str:
    """Rows of an ms-swift dataset, whose chats end with an answer."""
    output = [
        {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}],
         "solution": word}
        for word in ("one", "two", "three")
    ]  # fmt: skip
    return "\n".join(json.dumps(row) for row in output)


def test_script_for_ms_swift_trains_unchanged(run: RunCommand, model: Path, place: Path) -> None:
    assert importlib.util.find_spec("swift") is None
    for name, text in {
        "plugin.py": dedent(PLUGIN), "train.sh": dedent(SCRIPT).replace("MODEL", str(model)), "rows.jsonl": rows(),
    }.items():  # fmt: skip
        (place / name).write_text(text)
    shown = run("translate", "train.sh", "--out", "run.yaml").output
    assert "external_plugins -> stepper_args" in shown and "log_completions" in shown
    output = run("--swift", "train.sh", "--engine", "torch").output
    assert "multi_turn_scheduler -> stepper" in output
    settings = load_run_settings(place / "runs/moved")
    assert (settings.prompts, settings.n, settings.steps) == (2, 2, 1)
    rollouts = list(Rollouts(place / "runs/moved"))
    assert len(rollouts) == 4
    ended = [rollout for rollout in rollouts if rollout.stop is StopReason.STEP_DONE]
    truncated = [rollout for rollout in rollouts if rollout.stop is StopReason.LENGTH_TURN]
    assert len(ended) + len(truncated) == 4
    for rollout in rollouts:
        assert rollout.infos["num_turns"] == len(rollout.turns) and rollout.rewards
        assert all(turn.info[EXCLUDED_SPANS] == [[0, 1]] for turn in rollout.turns[:-1])
    metrics = [json.loads(line) for line in (place / "runs/moved/metrics.jsonl").read_text().splitlines()]
    assert any("reward/length" in rollout for rollout in metrics)


JUDGE = """\
    from swift.plugin import ORM

    class Judge(ORM):
        def __call__(self, attempt):
            return 1.0

    judge = Judge()
"""


def test_reward_function_of_run_file_may_import_ms_swift(run: RunCommand, model: Path, place: Path) -> None:
    (place / "judging.py").write_text(dedent(JUDGE))
    (place / "rows.jsonl").write_text(rows())
    components = {"judge": {"function": "judging.py:judge"}}
    settings = {"model": str(model), "data": "rows.jsonl", "columns": {"drop_answer": True}, "tools": []}
    (place / "judged.yaml").write_text(json.dumps(settings | {"reward": {"components": components}}))
    assert "judge" in run("--config", "judged.yaml", "--dry-run", "--engine", "torch").output
