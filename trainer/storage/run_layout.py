"""The files of a run's folder and of a checkpoint: each with what it holds, as the reference page lists them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath

RUN_LAYOUT: Mapping[str, Mapping[str, str]] = {
    "The run": {
        "run.json": "the resolved settings, the model, versions, git commit, engine, and a hash of the data; `--resume`"
        " compares with it",
        "metrics.jsonl": "a line for each step with all its metrics ([their names](metrics.md)); a value that is not"
        " finite is null",
        "progress.json": "what the run is doing now, training, `eval` or `rollout`, written every second; left by a"
        " process that was killed",
        "rollouts.jsonl": "a line for each rollout: ledger, messages, timing, rewards. Read it with `mtrl-train show`"
        " or `trainer.view.load` in Python",
        "rollouts.jsonl.index": "what `mtrl-train view` searches in, an SQLite file; made anew if it is deleted",
        "credits.jsonl": "the advantage that each token was trained with",
        "blobs/*": "images of the rollouts, each named by its sha256",
        "tapes/*": "with `record: true`, what tools answered from that step on",
        "logs/sglang-*.log": "what an SGLang server printed",
        "logs/rank-*.log": "what a rank printed",
        "logs/*.log": "what a rollout worker printed",
        "best.json": "the step with the highest `eval/greedy`, whose checkpoint is kept beside the latest ones",
        ".lock": "held by the process that writes the run, so that no second one does",
        ".running": "the user code that is running; left by a process that was killed, it names what was",
    },
    "Reporters": {
        "tensorboard/events.out.tfevents.*": "the metrics of each step for TensorBoard, always written:"
        " `tensorboard --logdir runs`. A resumed run adds a file",
        "reports/*": "the run's id at each service that `report` names (`wandb`, `mlflow`, `trackio`), so that a"
        " resumed run goes on there; delete it for a new one",
        "wandb/*": "what Weights & Biases keeps on this machine, with `report: [wandb]`",
    },
    "A checkpoint": {
        "checkpoints/*/state.json": "the step, the position in the data, the size of rollouts.jsonl, and the sha256 of"
        " every other file. It is written last: a folder without it is not resumed from",
        "checkpoints/*/model*.safetensors": "the weights, in the form that `from_pretrained` and SGLang load",
        "checkpoints/*/model.safetensors.index.json": "which file has which weights, of a large model",
        "checkpoints/*/config.json": "the model's configuration",
        "checkpoints/*/generation_config.json": "the model's defaults for generation",
        "checkpoints/*/adapter_model.safetensors": "with `update.lora`, the adapters instead of the weights, for peft",
        "checkpoints/*/adapter_config.json": "with `update.lora`, what the adapters are, and which model they are for",
        "checkpoints/*/optimizer.pt": "the state of the optimizers, and of the critic if there is one",
        "checkpoints/*/chance.pt": "the random states of Python, NumPy and torch",
        "checkpoints/*/tokenizer*": "the tokenizer, so that the folder is a whole model",
        "checkpoints/*/chat_template.jinja": "the chat template",
        "checkpoints/*/special_tokens_map.json": "names of special tokens, if the model has such a file",
        "checkpoints/*/added_tokens.json": "added tokens, if the model has such a file",
        "checkpoints/*/vocab.json": "the vocabulary, if the model has such a file",
        "checkpoints/*/merges.txt": "merges of the tokenizer, if the model has such a file",
        "checkpoints/*/*preprocessor_config.json": "how images are prepared, of a model that sees",
        "checkpoints/*/processor_config.json": "how text and images are put together, of a model that sees",
    },
    "A checkpoint of several ranks": {
        "checkpoints/*/shards/*": "the weights and the optimizer's state, a part of each rank, instead of"
        " model.safetensors and optimizer.pt. Any number of ranks, or one process, resumes from them; `mtrl-train"
        " export` writes a model from them",
        "checkpoints/*/shards/.metadata": "which part is in which file",
        "checkpoints/*/policy.json": "the optimizer steps so far, and the optimizers' settings",
        "checkpoints/.writing-*/*": "a checkpoint that is being written; the next start removes it",
        "checkpoints/.replaced-*/*": "an earlier checkpoint of this step while its successor takes its place",
    },
    "An evaluation": {
        "eval/comparison.json": "success before and after, sampled and greedy, from `mtrl-train eval`. The next one"
        " moves it to `eval-1/`, then `eval-2/`",
        "eval/*/*": "the rollouts of each of the four, a folder like a run's",
    },
}
"""Patterns of paths in a run's folder, by part of the page."""

RUN_NAMES = frozenset(pattern.split("/")[0] for files in RUN_LAYOUT.values() for pattern in files)
"""The files and folders directly in a run's folder."""


def describe_run_file(path: PurePath) -> str | None:
    """What a file of a run's folder holds, by its path in that folder; None for one that is not a run's."""
    name = path.as_posix()
    for files in RUN_LAYOUT.values():
        for pattern, meaning in files.items():
            if fnmatchcase(name, pattern) and (pattern.count("/") == name.count("/") or pattern.endswith("/*")):
                return meaning
    return None
