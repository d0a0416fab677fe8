"""How a run learns: frozen, complete, nothing unknown let through. Field descriptions are the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gateway.config.models import Frozen
from trainer.config import PlaySettings
from trainer.data.curriculum import Curriculum
from trainer.learn.settings import AlgorithmSettings
from trainer.policy.settings import UpdateSettings
from trainer.reward.settings import RewardSettings
from trainer.task import KIND

DEFAULT = "default"
"""The job that is run where nobody names another."""
DEMO = "demo"
"""Names the default job's model and tasks, which are made on the spot."""
DEMOS = (DEMO, "sight")
"""And those of a model that sees."""


class EvaluationSettings(Frozen):
    """What tells whether it helps: tasks that are not trained on."""

    data: str | None = None
    """A file as `data` is; by default the demo's own held-out tasks, or the tasks that are trained on, and it says so.
    """
    split: str = "test"
    """Of a data set that has any."""
    rows: PositiveInt = 300
    """Of these, so many are tried before and after."""
    every: NonNegativeInt = 10
    """Steps between two looks on the way; 0 looks at none."""
    few: PositiveInt = 50
    """Tasks of such a look, each tried once, by the likeliest tokens."""
    after: bool = False
    """At the end, all of them are tried sampled and by the likeliest tokens, with the model as it was and as it is."""
    kind: str = KIND
    """The column that tells kinds of tasks apart."""


class CheckpointSettings(Frozen):
    """What a later start goes on from."""

    every: PositiveInt | None = None
    """Steps between two; by default one after each step, as long as that takes less than `share` of the time."""
    share: PositiveFloat = 0.1
    """Of the time, what saving may take where `every` is not set."""
    keep: PositiveInt = Field(default=2, ge=2)
    """The latest ones that are kept. One alone could be lost in the midst of being replaced."""


class TrainSettings(PlaySettings):
    """What `mtrl-train` does; a run keeps it beside its metrics."""

    model: str = DEMO
    """A folder with a model as `save_pretrained` writes it; or `demo`, a tiny one that is made and kept,
    or `sight`, one that sees."""
    data: str = DEMO
    """A JSONL or parquet file, a saved data set's folder, a data set's name; or `demo`, tasks made up on the spot, or
    `sight`, such as only pictures answer."""
    out: Path | None = None
    """The run's folder; by default the next free one in `runs/`."""
    steps: PositiveInt = 100
    """Steps of the run; each rolls out, scores, and learns."""
    prompts: PositiveInt = 16
    """Tasks of a step."""
    n: PositiveInt = 8
    """Rollouts of each task, which are compared with each other."""
    kinds: tuple[str, ...] = ()
    """Of a demo's tasks, the kinds that are drawn; by default all of its job."""
    warm: Literal["habit", "plain"] = "habit"
    """How a demo's model was warm-started: with the habit of guessing, or on other kinds of tasks alone."""
    mode: Literal["synchronous", "one_step_off", "asynchronous"] = "synchronous"
    """How far rolling out runs ahead of learning. `synchronous`: a step's rollouts are made with the newest weights,
    while nothing else goes on. `one_step_off`: while a step learns, the next one's are made, with the weights before
    its own. `asynchronous`: they flow, go on under new weights, and a step takes the groups that are over."""
    max_staleness: PositiveInt = 1
    """With `mode: asynchronous`: the versions that the oldest token of a group may be behind when a step takes it. What
    is older is dropped and counted; no more is begun than steps could have by then."""
    draws: NonNegativeInt = 3
    """With `algorithm.dynamic`: how often groups that teach nothing are replaced before a step goes on with fewer."""
    reward: RewardSettings = RewardSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    update: UpdateSettings = UpdateSettings()
    curriculum: Curriculum = Curriculum()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    report: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Who is told the metrics, beside metrics.jsonl and TensorBoard."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.model in DEMOS and self.data != self.model:
            raise ValueError("a demo's model knows no words but its own tasks'; name a model of yours")
        if self.model == "sight" and self.warm != "habit":
            raise ValueError("the demo's model that sees has the habit of guessing; leave `warm` out")
        if self.algorithm.credit.kind == "gae" and self.update.critic is None:
            raise ValueError("`algorithm.credit.kind: gae` needs a critic; add `update.critic: {}`")
        if self.mode != "synchronous" and self.serving.placement == "together":
            raise ValueError("`serving.placement: together` needs times in which nothing is written; leave `mode` out")
        if not self.sampling.temperature:
            raise ValueError("what is sampled at temperature 0 cannot be learned from; raise `sampling.temperature`")
        return self
