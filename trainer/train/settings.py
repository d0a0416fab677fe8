"""Settings of a training run: the contents of a run file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from gateway.config.base import FrozenModel
from gateway.config.sections import make_sections
from trainer.algorithms.settings import AlgorithmSettings
from trainer.data.curriculum import Curriculum
from trainer.data.tasks import example_names
from trainer.distributed.settings import DistributedSettings
from trainer.policy.settings import UpdateSettings
from trainer.reward.settings import RewardSettings
from trainer.rollout.settings import BaseRolloutSettings

DEFAULT_JOB = "default"
"""The run file that is used if none is named."""
DEMO = "demo"
"""The name of the default job's model and tasks, which are generated."""


def _reject_empty(value: object) -> object:
    """An empty path would be the working folder."""
    if value == "":
        raise ValueError("is empty; name a folder, or leave it out")
    return value


class EvaluationSettings(FrozenModel):
    """Evaluation on tasks that are not trained on."""

    data: str | None = None
    """The evaluation tasks, named as in `data`. By default a demo's own held-out tasks, or else the training tasks,
    with a note that says so."""
    every: NonNegativeInt = 10
    """Steps between two evaluations during the run; 0 turns them off."""
    rows: PositiveInt = 50
    """Tasks of an evaluation during the run, each tried once with greedy decoding."""
    final_rows: PositiveInt = 300
    """Tasks of the evaluation before and after training."""
    k: PositiveInt = 1
    """Tries of each task in sampled evaluations, from which pass@k (one of k succeeds) and pass^k (all do) are told;
    above 1, evaluations during the run sample too. Greedy decoding tries once."""
    after: bool = False
    """Evaluates at the end, sampled and greedy, with the model before and after training."""


class EarlyStopSettings(FrozenModel):
    """Ends a run before its `steps`, once the model succeeds often enough; where both are given, both must hold."""

    training: float | None = Field(default=None, gt=0, le=1)
    """The mean success of the rollouts of the last 5 steps from which the run ends."""
    evaluation: float | None = Field(default=None, gt=0, le=1)
    """The success in the latest evaluation during the run from which it ends."""

    @model_validator(mode="after")
    def _require_bound(self) -> Self:
        if self.training is None and self.evaluation is None:
            raise ValueError("needs the success from which the run ends: write `training: 0.95` or `evaluation: 0.95`")
        return self


class SftSettings(FrozenModel):
    """Learns the assistant's turns of traces, instead of rollouts that are sampled; `mtrl-train sft` writes it.

    The traces are `data`: rows, or a run's folder, whose rollouts are traces."""

    where: str = ""
    """Which rollouts of a run are learned, such as `reward >= 1 and calls > 0`; by default all."""
    system: str | None = None
    """A system prompt in place of that of each trace; empty for none."""
    drop_examples: bool = False
    """Of what a rollout of a run began with, keeps only the system prompt and the last question, so that the policy
    learns to do without the examples before it."""


class CheckpointSettings(FrozenModel):
    """Checkpoints, from which a run can be resumed."""

    every: PositiveInt | None = None
    """Steps between two checkpoints; by default one after each step, as long as saving takes at most a tenth of the
    time."""
    keep: PositiveInt = Field(default=2, ge=2)
    """How many of the latest checkpoints are kept; at least 2, so that one is intact while another is replaced."""


if TYPE_CHECKING:
    TrainSections = FrozenModel
else:
    TrainSections = make_sections("TrainSections", lambda plugin: plugin.train_sections)


class TrainSettings(BaseRolloutSettings, TrainSections):
    """The settings of `mtrl-train`; a run saves them in its run.json."""

    model: Annotated[str, Field(min_length=1)] = DEMO
    """A model's folder as `save_pretrained` writes it; or `demo`, a tiny model that is built and cached, or `sight`,
    one with vision, `shelves`, one for tasks that were made from an MCP server, or `shell`, one for shell tasks."""
    data: Annotated[str, Field(min_length=1)] = DEMO
    """A JSONL or parquet file, the folder of a saved data set, or a data set's name; or `demo`, generated tasks, or
    `sight`, generated tasks about images, or `shelves`, tasks that were made from an MCP server."""
    out: Annotated[Path, BeforeValidator(_reject_empty)] | None = None
    """The run's folder; by default the next free one in `runs/`."""
    steps: PositiveInt = 100
    """Training steps; each generates and scores rollouts, and trains on them."""
    prompts: PositiveInt = 16
    """Tasks per step."""
    n: PositiveInt = 8
    """Rollouts per task: the group that is compared."""
    mode: Literal["synchronous", "one_step_off", "asynchronous"] = "synchronous"
    """How far rollouts run ahead of training. `synchronous`: a step's rollouts are made with the newest weights, and
    nothing else runs meanwhile. `one_step_off`: the next step's rollouts are made during a step, with the weights
    before it. `asynchronous`: rollouts run continuously, continue under new weights, and a step takes finished
    groups."""
    max_staleness: PositiveInt = 1
    """With `mode: asynchronous`: how many versions old the oldest token of a group may be when a step takes the group.
    Older groups are dropped and counted; only as many are started as steps can take in time."""
    sft: SftSettings | None = None
    reward: RewardSettings = RewardSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    update: UpdateSettings = UpdateSettings()
    distributed: DistributedSettings = DistributedSettings()
    curriculum: Curriculum = Curriculum()
    evaluation: EvaluationSettings = EvaluationSettings()
    early_stop: EarlyStopSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    objects: tuple[str, ...] = ()
    # Names in these settings that stand for Python objects: tools, data and reward functions that a script gives to
    # `mtrl_plugins.trl.api`. Only that script can resume and evaluate such a run. Not for run files.
    report: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Where metrics are reported, besides metrics.jsonl and TensorBoard, which always are. Each needs its package and
    its own login (`pip install wandb`, `wandb login`); one that fails is told, and the run goes on. The ids in
    `reports/` let a resumed run continue there."""

    @model_validator(mode="before")
    @classmethod
    def _prepare_sft(cls, values: Any) -> Any:
        """The defaults of SFT: no group, no tools but those of the traces, no evaluation without tasks for it."""
        if not isinstance(values, dict) or values.get("sft") is None:
            return values
        values = {"n": 1, "algorithm": {}, "tools": (), **values}
        if isinstance(values["algorithm"], dict):
            values["algorithm"] = {"name": "sft", **values["algorithm"]}
        evaluation = values.get("evaluation") or {}
        has_tasks = isinstance(evaluation, dict) and evaluation.get("data") is not None
        if isinstance(evaluation, dict) and not has_tasks:
            values["evaluation"] = {"every": 0, **evaluation}
            if values.get("environment") is None:  # It has no tasks, and nothing is generated.
                idle = {"engine": "torch", "engine_dtype": "float32", "concurrency": {"running_requests": 1}}
                values = idle | values
        return values

    def _check_sft(self) -> None:
        if self.sft is None:
            return
        if self.algorithm.name != "sft" or self.n != 1 or self.mode != "synchronous":
            raise ValueError("`sft` needs `algorithm.name: sft`, `n: 1` and `mode: synchronous`; leave them out")
        if self.algorithm.credit.kind != "outcome" or self.algorithm.dynamic_sampling:
            raise ValueError(
                "a trace has no siblings, and no reward but 1; leave `algorithm.credit.kind` and"
                " `algorithm.dynamic_sampling` out"
            )
        if self.evaluation.data is None and (self.evaluation.every or self.evaluation.after):
            raise ValueError("traces are no tasks to evaluate on; name some with `evaluation.data`")

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.update.compile and self.distributed.ranks > 1:
            raise ValueError("`update.compile` works in one process; leave it off, or `distributed.ranks` at 1")
        if self.update.lora and self.distributed.expert_parallel:
            raise ValueError("`distributed.expert_parallel` trains all weights; leave it, or `update.lora`, out")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        self._check_sft()
        examples = example_names()
        is_own = self.data not in examples and "model" in self.model_fields_set
        if self.model in examples and self.data != self.model and self.data not in self.objects and not is_own:
            others = "environment" if any(part.brings_rows for part in self.parts) else "data"
            raise ValueError(
                f"a demo's model knows only the words of its own tasks, not those of `{others}`; name a `model`, "
                "or write `model: demo` if they ask what the demo's tasks ask"
            )
        if self.early_stop is not None:
            if self.early_stop.evaluation is not None and not self.evaluation.every:
                raise ValueError("`early_stop.evaluation` needs evaluations during the run; raise `evaluation.every`")
            if self.early_stop.training is not None and self.sft is not None:
                raise ValueError("SFT samples no rollouts; write `early_stop.evaluation` instead of `.training`")
        if self.n == 1 and self.algorithm.compares_rollouts and not self.algorithm.distills:
            raise ValueError(
                f"n is 1, but {self.algorithm.name} compares the rollouts of a task with each other, so nothing would"
                " be learned; set `n: 8`, or `algorithm.name: reinforce_pp`"
            )
        if self.algorithm.credit.kind == "gae" and self.update.critic is None:
            raise ValueError("`algorithm.credit.kind: gae` needs a critic; add `update.critic: {}`")
        if self.mode != "synchronous" and self.serving.placement == "together":
            raise ValueError("`serving.placement: together` works in synchronous mode only; leave `mode` out")
        if not self.sampling.temperature:
            raise ValueError("training needs sampling at a temperature above 0; raise `sampling.temperature`")
        reference = self.algorithm.kl.reference
        if reference is not None and reference.url is not None and self.sampling.temperature != 1:
            raise ValueError(
                "a server returns logprobs at temperature 1 only; leave `sampling.temperature` out, or name"
                " the teacher's folder (`algorithm.kl.reference.model`)"
            )
        return self
