"""The run file's settings for agents: what plays a rollout, with what environment, and what its failures mean."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, model_validator

from gateway.config.base import rule_error
from gateway.errors import ConfigError
from gateway.sandbox.grade_settings import GradeSettings, check_places
from gateway.sandbox.sandbox_settings import MAX_MB, Network, SandboxSettings, check_network
from trainer.rollout.run_part import RunPart

if TYPE_CHECKING:
    from mtrl_plugins.agents.agent_host import AgentHost
    from trainer.rollout.rollout import Rollout
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.task import Task


class AgentSandbox(SandboxSettings):
    """The box in which an agent's program runs. Its paths are relative to the working folder."""

    network: Annotated[Network, AfterValidator(check_network)] = "loopback"
    """`loopback`: the endpoint alone; a list of hosts: these, too, as in tool files."""
    memory_mb: Annotated[int, Field(ge=32, le=MAX_MB)] = 4096
    """Memory of all processes together. Where cgroups cannot be written: of each process, and shared memory is not
    counted; `control_groups: required` is strict."""
    processes: Annotated[int, Field(ge=1, le=4_000_000)] = 512
    """Processes and threads."""
    disk_mb: Annotated[int, Field(ge=1, le=MAX_MB)] = 1024
    """Size of each of its folders in memory, and of all that it changes of a `root`."""
    files: Annotated[int, Field(ge=1, le=2**31)] = 100_000
    """Files and folders in each of these."""
    root_column: str = ""
    """The column of a row that names its root, in place of `root`."""

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        if self.network == "none":
            raise rule_error("an agent reaches its endpoint by the loopback interface", "write `network: loopback`")
        if self.provider is not None:
            raise rule_error(f"agents do not run in a `{self.provider.key}`", "remove it: bubblewrap runs them")
        return self


class AgentSettings(RunPart):
    """An agent that exists already: a program, a Python function, or whoever opens sessions over HTTP.

    It talks to the policy through an endpoint with the protocols of OpenAI, Anthropic and Google.
    """

    key: ClassVar[str] = "agent"
    acts_unseen: ClassVar[bool] = True

    command: str | tuple[str, ...] | None = None
    """A program, started for each rollout, as a list of words or as one line; never run by a shell. `{prompt}`,
    `{base_url}`, `{anthropic_base_url}`, `{api_key}`, `{model}`, `{mcp_url}`, `{folder}` (with its `files`) and
    `{task_file}` in a word are replaced."""
    function: str | None = None
    """`module:name` or `my_agent.py:run`: an async function that is called with the base URL, the task and the
    session. It may return the reward."""
    external: bool = False
    """Programs elsewhere open sessions by `POST /sessions`, play them, and post the reward."""
    env: dict[str, str] = {}
    """Further environment variables of the program; the same words are replaced. It gets `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `GOOGLE_GEMINI_BASE_URL`, `GEMINI_API_KEY` and
    `MTRL_MCP_URL`, and of ours nothing in a sandbox, else `PATH`, `HOME`, `LANG` and `TZ`."""
    inherit_env: tuple[str, ...] = ()
    """Names of our own environment variables that the program gets, too."""
    cwd: Path | None = None
    """A folder of which each rollout gets a copy to work in; by default an empty one. It is removed at the end."""
    files: dict[str, str] = {}
    """Further files of that folder, by their path in it, such as a configuration that names the endpoint; the same
    words are replaced."""
    stdin: Literal["prompt", "json", "none"] = "prompt"
    """What the program reads: the last question as text, the task as JSON, or nothing."""
    sandbox: AgentSandbox | Literal["none"] | None = None
    """Confines a program: by default to a sandbox of bubblewrap wherever that works, with the program's installation
    and its endpoint, and nothing else of this machine. `none`: it runs as your user, with your files and network."""
    grade: GradeSettings | None = None
    """What gives the reward `grade`, from the files that a program left in its sandbox."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    on_failure: Literal["lost", "scored"] = "lost"
    """What a program that fails after it was served, or a function that raises, means: the rollout is lost to
    infrastructure, or it is scored like any other."""
    stop_s: PositiveFloat = 5.0
    """Seconds that an agent has to end by itself once the policy writes nothing more, and a program after SIGTERM."""
    open_s: PositiveFloat = 600.0
    """With `external`, seconds without a program that opens a session, after which rollouts that wait are lost."""
    idle_s: PositiveFloat = 3600.0
    """With `external`, seconds without a request after which a session is ended: its program died, or forgot it. A
    generation or a tool call that is under way counts as a request."""
    address_file: Path | None = None
    """With `external`, a file for programs with the address of the endpoint and the run's key, as JSON that only this
    user may read; it is removed at the end. By default they are printed."""
    host: str = "127.0.0.1"
    """Where the endpoint listens. Other machines reach it only at another address."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The endpoint's port; by default a free one."""
    public_url: str | None = None
    """The endpoint's address as agents reach it, if it is not the one where it listens, as behind a proxy."""
    sampling: Literal["run", "request"] = "run"
    """Whose temperature and top-p count: the run's, which training assumes, or the request's."""
    output_chars: NonNegativeInt = 20_000
    """The most characters of a program's output that are kept: the end of it."""

    def describe(self) -> str:
        """Who plays, in words."""
        if self.function is not None:
            return f"an agent plays the rollouts: the function {self.function}"
        if self.command is not None:
            how = "not confined" if self.sandbox == "none" else "in a sandbox where bubblewrap works"
            return f"an agent plays the rollouts: the program {' '.join(self.words)}, {how}"
        return "agents play the rollouts: programs that open sessions over HTTP"

    @property
    def words(self) -> list[str]:
        """The command's words."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command or ())

    @property
    def takes_tools(self) -> bool:
        """Whether the program is told where it finds the rollout's tools."""
        return any("{mcp_url}" in text for text in (*self.words, *self.env.values(), *self.files.values()))

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in ("command", "function", "external") if getattr(self, name)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ValueError(f"give one of `command`, `function` and `external: true`, not {names}")
        for name in ("env", "cwd", "files", "inherit_env", "sandbox", "grade"):
            if getattr(self, name) and not self.command:
                raise ValueError(f"`{name}` is for a `command`")
        if self.grade is not None and self.sandbox == "none":
            raise ValueError("`grade` judges what is left in a sandbox: remove `sandbox: none`")
        if self.grade is not None and not (isinstance(self.sandbox, AgentSandbox) and self.sandbox.root_column):
            check_places(self.grade, self.sandbox if isinstance(self.sandbox, AgentSandbox) else AgentSandbox())
        for path in map(PurePosixPath, self.files):
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"`files`: '{path}' is no path inside the folder")
        if self.args and not self.function:
            raise ValueError("`args` are for a `function`")
        return self

    def check(self, settings: BaseRolloutSettings) -> None:
        if settings.stepper is not None:
            raise ValueError("`stepper` and `agent` exclude each other: an agent decides itself what comes next")
        for part in settings.parts:
            if part.has_boxes:
                self._check_boxed(part.key, is_recorded=settings.record)
            elif part.brings_rows:
                raise ValueError(f"`{part.key}` and `agent` exclude each other: each plays the rollouts itself")
        if settings.record and self.external:
            raise ValueError("`record` and `agent.external` exclude each other: nobody could be asked to play again")
        if any(part.key == "rollout" for part in settings.parts) and (self.external or self.port or self.public_url):
            problem = "`rollout` excludes `agent.external`, `agent.port` and `agent.public_url`"
            raise ValueError(f"{problem}: each worker serves its agents at an address of its own")

    def _check_boxed(self, key: str, *, is_recorded: bool) -> None:
        """Raises for what does not go with tasks that have boxes of their own."""
        if self.command is None:
            raise ValueError(f"the tasks of `{key}` are played by an `agent` with a `command`, in their own boxes")
        if given := [name for name in ("sandbox", "grade", "cwd") if getattr(self, name) is not None]:
            raise ValueError(f"the tasks of `{key}` say where an agent works, and grade it: remove `agent.{given[0]}`")
        if is_recorded:
            raise ValueError(f"`record` excludes an agent in the boxes of `{key}`: what it does there is on no tape")

    def make_player(self, settings: BaseRolloutSettings) -> AgentHost:
        from mtrl_plugins.agents.agent_box import find_program
        from mtrl_plugins.agents.agent_host import AgentHost

        if any(part.has_boxes for part in settings.parts):
            return AgentHost(self, are_tasks_boxed=True)
        host = AgentHost(self)
        has_root = host.box is not None and bool(host.box.root or host.box.root_column)
        self._check_command(is_installed=not has_root)
        if host.box is not None and (host.box.root or not host.box.root_column):
            find_program(self, host.box)
        return host

    def _check_command(self, *, is_installed: bool) -> None:
        """Looks for the program where it will be looked for; one among the rollout's own files is not checked."""
        if self.command is None:
            return
        words = self.words
        remedy = "name an installed program, or its whole path"
        if not words:
            raise ConfigError("has no words", field="agent.command", remedy=remedy)
        program = words[0]
        if not is_installed or "{" in program or program.removeprefix("./") in self.files:
            return
        if "/" in program and not Path(program).is_absolute():  # It is started in the rollout's own folder.
            remedy = "give its whole path, or set `agent.cwd` to the folder that has it"
            program = str(self.cwd.absolute() / program) if self.cwd else ""
        if shutil.which(program, path=self.env.get("PATH")) is None:
            raise ConfigError(f"there is no program {words[0]!r}", field="agent.command", remedy=remedy)

    def find_mistakes(self, tasks: Iterable[Task]) -> Sequence[ConfigError]:
        """The first row that asks for an interaction, which agents do not have; the first that names no root."""
        column = self.sandbox.root_column if isinstance(self.sandbox, AgentSandbox) else ""
        task: Task | None = None
        roots: dict[str, Task] = {}
        for each in tasks:
            task = task or (each if each.has_feedback else None)
            if column and each.columns.get(column) is not None:
                roots.setdefault(str(each.columns[column]), each)
        if roots:
            from gateway.sandbox.roots import find_root
        for root, each in roots.items():
            try:
                find_root(root)
            except ConfigError as error:
                problem = f"the task {each.id!r} names its root in `{column}`: {error.problem}"
                return [ConfigError(problem, field="agent.sandbox.root_column", remedy=error.remedy)]
        if task is None:
            return []
        remedy = "leave the row's interaction out, or `agent`: an agent talks to its users itself"
        return [ConfigError(f"the task {task.id!r} has an interaction, and an agent plays", remedy=remedy)]

    def compute_metrics(self, rollouts: Iterable[Rollout]) -> Mapping[str, float]:
        """What agents changed, branches of their chats, and requests that were refused."""
        infos = [rollout.infos["agent"] for rollout in rollouts if isinstance(rollout.infos.get("agent"), dict)]
        if not infos:
            return {}
        metrics = {
            "agent/branches": sum(info.get("branches", 1) for info in infos) / len(infos),
            "agent/retokenised": float(sum(info.get("retokenised", 0) for info in infos)),
        }
        for name, kind in (("changed_by_agent", "changed"), ("requests", "requests")):
            counts = sum((Counter(info.get(name, {})) for info in infos), Counter[str]())
            metrics |= {f"agent/{kind}/{cause}": float(count) for cause, count in sorted(counts.items())}
        return metrics
