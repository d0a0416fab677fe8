"""Ways to split a model that the trainer does not have are refused by name, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.trainer.cli_data import RunCommand
from trainer.distributed.unbuilt import BY_NAME
from trainer.train.settings import TrainSettings


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("where", ["", "distributed", "update"])
def test_setting_for_what_is_not_built_is_refused_with_the_remedy(name: str, where: str) -> None:
    problem, remedy = BY_NAME[name]
    key = f"{name}_size" if name.endswith("parallel") else name
    for value in (2, True, {"pin": True}):
        with pytest.raises(ValidationError) as caught:
            TrainSettings.model_validate({where: {key: value}} if where else {key: value})
        assert f"`{where + '.' if where else ''}{key}`: {problem}; {remedy}" in str(caught.value)


def test_command_tells_each_with_the_run_file(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("run.yaml")
    file.write_text("distributed: {ranks: 2, tensor-parallel-size: 2}\n")
    output = run("--config", "run.yaml", code=2).output
    assert (
        "run.yaml" in output and "distributed.tensor-parallel-size" in output and "remedy: set `distributed.t" in output
    )
    file.write_text("distributed: {ranks: 2}\nupdate: {sequence_parallel: 2}\n")
    assert "remedy: leave it out and set `update.checkpointing: true`" in run("--config", "run.yaml", code=2).output
    assert [*tmp_path.iterdir()] == [tmp_path / "run.yaml"], "nothing was started"
