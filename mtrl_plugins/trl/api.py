"""Training from Python with the interface of TRL's GRPOTrainer: its tools, reward functions and environments run here.

The run is an ordinary one: `mtrl-train view`, `show` and `why` read its folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from gateway.errors import ConfigError, unwrap_error
from mtrl_plugins.trl.caller_thread import CallerThread
from mtrl_plugins.trl.function_tools import CallerTools
from mtrl_plugins.trl.job_parts import JobParts, name_model
from mtrl_plugins.trl.reward_functions import RewardFunction
from trainer.model import require_whole_model
from trainer.storage.run_files import METRICS_FILE, RUN_INFO_FILE, find_run_folder, read_metrics
from trainer.train.checkpoint import STATE_FILE, Checkpoint, Checkpoints
from trainer.train.run_folder import choose_run_folder
from trainer.train.settings import TrainSettings

MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model"})
"""Files of a checkpoint that make up the model."""
REFUSED: Mapping[str, str] = {
    "reward_processing_classes": "reward models are not loaded; ask them in a reward function",
    "callbacks": "read `trainer.state.log_history`, or metrics.jsonl in the run's folder",
    "quantization_config": "leave it out: there is no quantised training",
    "rollout_func": "write a stepper, and name it: settings={'stepper': 'module:name'}",
}
"""Parameters of TRL's trainer that are not supported, with what to do instead."""


class GRPOConfig(dict[str, Any]):
    """The arguments of a run by the names of TRL's GRPOConfig, where TRL is not installed. Its own is taken as well.

    Arguments that are unknown, or not supported, are refused when the trainer is made.
    """

    def __init__(self, output_dir: str | Path | None = None, **arguments: Any) -> None:
        given = {} if output_dir is None else {"output_dir": str(output_dir)}
        super().__init__(given | arguments)


class TrainOutput(NamedTuple):
    """What a run came to."""

    global_step: int
    """Optimizer updates so far."""
    training_loss: float
    """The mean loss of all steps."""
    metrics: dict[str, float]
    """Those of the last step, and `train_runtime`, `train_loss` and the like, as TRL has them."""
    folder: Path
    """The run's folder."""
    policy: Path
    """The folder of the trained model, within it."""


class GRPO:
    """Trains a model with the arguments of TRL's GRPOTrainer.

    Synchronous tools, reward functions and methods of environments run on the thread that calls `train()`, one after
    the other, as in TRL; async ones run together.
    """

    def __init__(  # noqa: PLR0913 - the parameters of TRL's trainer, in their order
        self,
        model: Any = None,
        reward_funcs: RewardFunction | list[RewardFunction] | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any] | str | Path] | None = None,
        rollout_func: Any = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
        tool_threads: bool = False,
    ) -> None:
        """`args` is a `trl.GRPOConfig` or a dict with its names; `settings` has those of a run file, which override it.

        A tool or reward function that runs longer than `timeout_s` costs its rollout. With `tool_threads`, synchronous
        tools run in threads, several at once.
        """
        refused = {
            "reward_processing_classes": reward_processing_classes,
            "callbacks": callbacks,
            "quantization_config": quantization_config,
            "rollout_func": rollout_func,
        }
        for name, value in refused.items():
            if value:
                raise ConfigError("is not supported", field=name, remedy=REFUSED[name])
        if any(part is not None for part in optimizers or ()):
            remedy = "leave it out; the rates of AdamW are settings={'update': {...}}"
            raise ConfigError("are not supported", field="optimizers", remedy=remedy)
        self.args = args
        self._model, self._processing_class = model, processing_class
        self._parts = JobParts(
            CallerTools(CallerThread(), timeout_s, in_threads=tool_threads),
            args=args,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            tools=tools,
            environment_factory=environment_factory,
            peft_config=peft_config,
            settings=settings or {},
        )
        self._folder: Path | None = None
        self._settings: TrainSettings | None = None

    @property
    def folder(self) -> Path:
        """The folder of the run, once it was started."""
        folder = self._folder or self._parts.out
        if folder is None or not (folder / RUN_INFO_FILE).exists():
            raise ConfigError("there is no run yet", remedy="call train() first")
        return folder

    @property
    def state(self) -> Any:
        """The `trainer_state` after the latest step; `log_history` has the metrics of every step."""
        from transformers import TrainerState

        history = read_metrics(self.folder / METRICS_FILE)
        return TrainerState(global_step=self._updates(history), log_history=history)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Trains, or resumes the run in `output_dir`, the newest run, or the one in a given folder.

        May be called where an event loop is running, as in Jupyter: training has a thread of its own.
        """
        from trainer.train.start import train

        started = time.monotonic()
        self._folder = folder = self._choose_folder(resume_from_checkpoint)
        self._settings = settings = self._make_settings(folder)
        steps_before = len(self._trained_steps(folder))
        objects, resume = self._parts.objects(settings), bool(resume_from_checkpoint)
        self._run(partial(train, settings, folder, Console(force_jupyter=False), resume=resume, objects=objects))
        return self._output(time.monotonic() - started, steps_before)

    def evaluate(self) -> dict[str, Any]:
        """Compares the model before training with the latest checkpoint on `eval_dataset`, or else the training rows.

        The result has the shares of tasks on which the first reward function gave at least 1: `greedy`, `sampled`,
        `greedy_before`, `sampled_before`, with 95 % `intervals`.
        """
        from trainer.train.evaluate import compare_run

        settings = self._settings or self._make_settings(self.folder)
        objects = self._parts.objects(settings)
        comparison = self._run(partial(compare_run, self.folder, None, None, Console(force_jupyter=False), objects))
        summary: dict[str, Any] = comparison.summary
        return summary

    def save_model(self, output_dir: str | Path) -> Path:
        """Copies the trained model, with its tokenizer, into a folder that `from_pretrained` loads."""
        folder, checkpoint = Path(output_dir), self._checkpoint().folder
        require_whole_model(checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        for file in checkpoint.iterdir():
            if file.suffix in MODEL_SUFFIXES and file.name != STATE_FILE:
                shutil.copyfile(file, folder / file.name)
        return folder

    def _run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            return self._parts.tools.caller.run(main)
        except BaseExceptionGroup as group:
            raise unwrap_error(group) from group

    def _choose_folder(self, resume: bool | str | Path | None) -> Path:
        if isinstance(resume, str | Path):
            return find_run_folder(Path(resume))
        out = self._parts.out
        if out is not None and not resume and (out / RUN_INFO_FILE).exists():
            remedy = "call train(resume_from_checkpoint=True), or choose another output_dir"
            raise ConfigError("the folder already has a run", file=out, remedy=remedy)
        name = Path(self._model).name if isinstance(self._model, str | Path) else "grpo"
        return choose_run_folder(TrainSettings(out=out), name, resume=bool(resume))

    def _make_settings(self, folder: Path) -> TrainSettings:
        return self._parts.settings(name_model(self._model, folder, self._processing_class), folder)

    def _checkpoint(self) -> Checkpoint:
        checkpoint = Checkpoints(self.folder).find_latest()
        if checkpoint is None:
            raise ConfigError("the run has no checkpoint yet", file=self.folder, remedy="train at least one step")
        return checkpoint

    def _trained_steps(self, folder: Path) -> list[dict[str, float]]:
        file = folder / METRICS_FILE
        return [metrics for metrics in read_metrics(file) if metrics["step"] > 0] if file.exists() else []

    def _updates(self, history: list[dict[str, float]]) -> int:
        update = (self._settings or self._make_settings(self.folder)).update
        return int(max((metrics["step"] for metrics in history), default=0)) * update.minibatches * update.epochs

    def _output(self, seconds: float, steps_before: int) -> TrainOutput:
        history = self._trained_steps(self.folder)
        losses = [metrics["loss"] for metrics in history if "loss" in metrics]
        loss = fsum(losses) / len(losses) if losses else 0.0
        steps, settings = len(history) - steps_before, self._settings or TrainSettings()
        runtime = {
            "train_runtime": seconds,
            "train_samples_per_second": steps * settings.prompts * settings.n / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": loss,
        }
        last = history[-1] if history else {}
        return TrainOutput(self._updates(history), loss, {**last, **runtime}, self.folder, self._checkpoint().folder)


GRPOTrainer = GRPO
"""The name that it has in TRL."""
