"""Settings of a grade: which command gives the reward of a rollout's sandbox, once the policy has ended."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from gateway.config.base import FrozenModel, rule_error
from gateway.errors import ConfigError
from gateway.sandbox.grade_files import KERNEL_FOLDERS
from gateway.sandbox.sandbox_settings import SandboxSettings, check_environment


def _check_place(value: str) -> str:
    parts = PurePosixPath(value).parts
    if not value.startswith("/") or len(parts) < 2 or ".." in parts or "\0" in value:
        raise rule_error("it is no whole path of a file or folder inside", "write one such as `/app/answer.txt`")
    path = "/" + "/".join(parts[1:])
    if f"{path}/".startswith(KERNEL_FOLDERS):
        raise rule_error(f"{path} lies in a folder of the kernel or of the sandbox", "name a place elsewhere")
    return path


Place = Annotated[str, AfterValidator(_check_place)]


def check_places(grade: GradeSettings, sandbox: SandboxSettings) -> None:
    """Raises for places that cannot be written in a sandbox."""
    for place in (*grade.files, *grade.artifacts, grade.reward) if not sandbox.writes_root else ():
        if not place.startswith("/rollout/"):
            problem = f"`grade` cannot use {place}, since only `/rollout` of this sandbox can be written"
            raise rule_error(problem, "name places below `/rollout`, also for `reward`, or give it a `root`")


def resolve_grade(grade: GradeSettings, folder: Path, file: object, field: str) -> GradeSettings:
    """The settings with whole paths; raises ConfigError for a file that is not there."""
    files = {place: folder / path.expanduser() for place, path in grade.files.items()}
    for path in files.values():
        if not path.exists():
            remedy = "create it, or correct the path"
            raise ConfigError(f"there is no {path}", file=file, field=f"{field}.files", remedy=remedy)
    return grade.model_copy(update={"files": files})


class GradeSettings(FrozenModel):
    """Grades what a rollout left in its sandbox. No process of the policy runs by then."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """What is run, such as `[bash, /tests/test.sh]`; its exit status does not count."""
    files: dict[Place, Path] = {}
    """Files and folders that are put in for it, by their place inside, as `/tests: tests`; relative to the file."""
    reward: Place = "/logs/verifier"
    """The folder, made empty before, in which the command writes `reward.json` (a number, or an object of numbers, of
    which `reward` counts, or their mean) or `reward.txt` (a number). Without one, the reward is 0."""
    mode: Literal["fresh", "same"] = "fresh"
    """`fresh`: in a new sandbox that has nothing of the policy's but the `artifacts`. `same`: with all that the policy
    left; programs and modules that it replaced are run."""
    artifacts: tuple[Place, ...] = ()
    """What a fresh sandbox gets of the policy's files and folders. Links that lead elsewhere, pipes and sockets are
    left out."""
    artifact_mb: Annotated[int, Field(ge=1, le=512)] = 32
    """What the artifacts may have; more is graded 0."""
    artifact_files: PositiveInt = 10_000
    """How many files and folders they may have."""
    env: Annotated[dict[str, str], AfterValidator(check_environment)] = {}
    """Environment variables of the command."""
    timeout_s: PositiveFloat = 120.0
    """How long the command may take; one that takes longer is graded 0."""

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if self.artifacts and self.mode == "same":
            raise rule_error("`artifacts` belong to `mode: fresh`", "remove them: with `same` all files are there")
        ours = (*self.files, self.reward)
        for one, other in [(a, b) for a in self.artifacts for b in ours]:
            if PurePosixPath(one).is_relative_to(other) or PurePosixPath(other).is_relative_to(one):
                raise rule_error(f"the artifact {one} would lie over {other}", "name what is in it, or beside it")
        return self
