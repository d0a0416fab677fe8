"""Reads the commands that a script launches, by running it in a confined bash."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.config.entries import display_path
from gateway.errors import ConfigError, ConfigErrors
from mtrl_plugins.scripts import confine, stubs
from mtrl_plugins.scripts.launches import (
    UNKNOWN_TEXT,
    Launch,
    Records,
    Run,
    bash_errors,
    merge_unknown,
    place_launch,
    show_text,
)

VARIANTS = (("", ()), ("7\n", ()), ("unknown\n", stubs.QUIET_COMMANDS))
"""What stubs print and which are missing: a command that is the same each time depends on none of it."""
PASSED_VARIABLES = ("HOME", "USER", "LOGNAME")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_CHOICE = re.compile(r"(.+)#(\d+)")
HARMLESS_SOURCES = re.compile(
    r"(?:.*/)?(activate|set_env\.sh|setvars\.sh|conda\.sh|\.?bashrc|\.bash_profile|\.profile|profile)"
)
"""Files that set up an environment of programs; no argument depends on them."""
NO_TRAINING = "neither `python3 -m verl.trainer.main_ppo` nor `swift rlhf`"
SWIFT_COMMAND = re.compile(
    r"^(?!\s*#).*\b((swift|megatron)\s+|swift[./]cli[./](_megatron[./])?)(rlhf|rollout)\b", re.MULTILINE
)
WRITE_VALUE = "write its lines into the script, or the command without the script"


def tell_on_stderr(line: str) -> None:
    """Prints a line for the operator."""
    sys.stderr.write(f"mtrl-train: {line}\n")


def split_choice(name: str) -> tuple[Path, int | None]:
    """The file and the number of `run.sh#2`, which means the second training command of `run.sh`."""
    match = _CHOICE.fullmatch(name)
    return (Path(match[1]), int(match[2])) if match and not Path(name).exists() else (Path(name), None)


def read_if_text(file: Path) -> str:
    """The text of a file; nothing if it cannot be read as text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def is_swift(words: Sequence[str]) -> bool:
    """True if the words, or a file among them, have a command of ms-swift."""
    files = (split_choice(word)[0] for word in words if Path(word).suffix not in (".yaml", ".yml"))
    return any(SWIFT_COMMAND.search(text) for text in (" ".join(words), *map(read_if_text, files)))


@dataclass(frozen=True, slots=True)
class ScriptReader:
    """Reads scripts with bash, which is confined."""

    tell: Callable[[str], None] = tell_on_stderr
    deadline_s: float = confine.DEADLINE_S

    def read(self, name: str | Path, is_training: Callable[[Sequence[str]], bool], wanted: str) -> Launch:
        """The training command of a script, or of `script#N`; `wanted` describes it in errors."""
        file, number = split_choice(str(name))
        if launches := self.read_all(file, is_training):
            return choose_launch(launches, file, number)
        remedy = "name the script that has the training command"
        raise ConfigError(f"has {wanted}", file=display_path(file), remedy=remedy)

    def read_all(self, file: Path, is_training: Callable[[Sequence[str]], bool]) -> list[Launch]:
        """All training commands of a script, in the order in which they are launched."""
        text = read_script_text(file)
        environment, hidden = pass_environment(text)
        if not confine.can_confine():
            problem = "scripts are read by bash, which is not installed or cannot be confined here"
            remedy = "install bash and bubblewrap, or name the command itself instead of its script"
            raise ConfigError(problem, file=display_path(file), remedy=remedy)
        passed = [name for name in environment if name not in PASSED_VARIABLES and name not in hidden]
        self.tell(
            f"bash runs {display_path(file)} without files, network and programs, to see what it launches"
            + (f"; it gets {', '.join(passed)} of your environment" if passed else "")
        )
        return _ConfinedScript(file, text, environment, self.deadline_s).launches(is_training)


def read_script_text(file: Path) -> str:
    """A script's text; a doubled backslash at the end of a line is read as one, since it is left by a bad copy."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        remedy = "name a script or a YAML file"
        raise ConfigError(f"cannot be read: {error}", file=display_path(file), remedy=remedy) from None
    if "\0" in text:
        raise ConfigError("is not a script", file=display_path(file), remedy="name a script or a YAML file")
    return re.sub(r"(?<!\\)\\\\$", r"\\", text.replace("\r\n", "\n"), flags=re.MULTILINE)


def pass_environment(text: str) -> tuple[dict[str, str], set[str]]:
    """Variables of the environment that a script names; those whose name is that of a secret get no value."""
    named = {*_VARIABLE.findall(text), *PASSED_VARIABLES} & set(os.environ)
    named = {name for name in named if not name.startswith(("BASH", "LD_", "MTRL_")) and name not in ("PATH", "PWD")}
    hidden = {name for name in named if SECRET_NAME.search(name)}
    return {name: UNKNOWN_TEXT if name in hidden else os.environ[name] for name in sorted(named)}, hidden


def choose_launch(launches: Sequence[Launch], file: Path, number: int | None) -> Launch:
    """The only command, or the one with a number; the same command launched again is one command."""
    distinct = list({launch.texts: launch for launch in reversed(launches)}.values())[::-1]
    if number is None and len(distinct) > 1:
        raise _several_error(distinct, display_path(file))
    if number is not None and not 1 <= number <= len(distinct):
        problem = f"there is no training command {number}: it launches {len(distinct)}"
        raise ConfigError(problem, file=display_path(file), remedy=f"write a number up to {len(distinct)}")
    return distinct[(number or 1) - 1]


def _several_error(launches: Sequence[Launch], file: Path) -> ConfigError:
    shown = "; ".join(
        f"{number} at line {launch.place.rpartition(':')[2]}: {_difference(launch, launches)}"
        for number, launch in enumerate(launches, 1)
    )
    problem = f"launches {len(launches)} different training commands: {shown}"
    return ConfigError(problem, file=file, remedy=f"name one of them by its number, such as {file}#1")


def _difference(launch: Launch, launches: Sequence[Launch]) -> str:
    """The first words that not all commands have."""
    common = set.intersection(*(set(each.texts) for each in launches))
    own = [text for text in launch.texts if text not in common]
    return show_text(" ".join(own[:2]) or launch.summary)


@dataclass(frozen=True, slots=True)
class _ConfinedScript:
    """A script that bash runs several times, each time with other output of the programs that are not run."""

    file: Path
    text: str
    environment: Mapping[str, str]
    deadline_s: float

    def launches(self, is_training: Callable[[Sequence[str]], bool]) -> list[Launch]:
        records, ended = self._run(*VARIANTS[0])
        trained = [index for index, run in enumerate(records.runs) if is_training(run.words)]
        self._refuse_unread(records, trained)
        if not trained:
            self._refuse_failure(records, ended)
            return []
        trained.sort(key=lambda index: records.runs[index].line)  # Those in the background run in any order.
        found = [records.runs[index] for index in trained]
        others = [self._training_runs(variant, is_training) for variant in VARIANTS[1:]]
        if any(len(other) != len(found) for other in others):
            raise self._depends_error(records, max(trained))
        lines = self.text.splitlines()
        launches = []
        for index, run in enumerate(found):
            same = [run.words, *(other[index].words for other in others)]
            if (words := merge_unknown(same)) is None:
                raise self._depends_error(records, trained[index])
            launches.append(place_launch(words, run.environment, run.line, lines, str(display_path(self.file))))
        return launches

    def _run(self, output: str, hidden: Sequence[str]) -> tuple[Records, confine.Ended]:
        jail = confine.make_jail(self.file, self.text, self.environment, output, hidden)
        ended = confine.run_confined(jail, self.deadline_s)
        return Records.parse(ended.records), ended

    def _training_runs(
        self, variant: tuple[str, Sequence[str]], is_training: Callable[[Sequence[str]], bool]
    ) -> list[Run]:
        runs = [run for run in self._run(*variant)[0].runs if is_training(run.words)]
        return sorted(runs, key=lambda run: run.line)

    def _refuse_unread(self, records: Records, trained: Sequence[int]) -> None:
        """Refuses what is unknown before the last training command."""
        last = trained[-1] if trained else len(records.runs)
        errors = [
            error
            for note in records.notes
            if note.runs_before <= last and (error := self._note_error(note.kind, note.line, note.text))
        ]
        if errors:
            raise ConfigErrors({str(error): error for error in errors}.values())

    def _note_error(self, kind: str, line: int, text: str) -> ConfigError | None:
        if kind == "source" and HARMLESS_SOURCES.fullmatch(text):
            return None
        problem, remedy = {
            "missing": (
                f"calls {text or 'a program'}, which is not run here",
                "remove it if no argument depends on it",
            ),
            "source": (f"reads {text}, which bash cannot see here", WRITE_VALUE),
            "folder": (f"changes to the folder {text}, which cannot be made here", "write the path of a folder"),
        }[kind]
        return self._error(line, problem, remedy)

    def _refuse_failure(self, records: Records, ended: confine.Ended) -> None:
        """Refuses a script that launched nothing because bash stopped or did not end."""
        if ended.timed_out:
            line = records.runs[-1].line if records.runs else 0
            problem = f"bash did not end within {self.deadline_s:g} s, and launched no training"
            raise self._error(line, problem, "name a script that only launches the training")
        for line, message in list(bash_errors(ended.messages, str(self.file)))[-1:]:
            raise self._error(line, f"bash stopped: {message}", "correct this line, or set the variable")

    def _depends_error(self, records: Records, last: int) -> ConfigError:
        run = next((run for run in reversed(records.runs[:last]) if run.prints_something), records.runs[last])
        problem = f"the training command depends on what `{' '.join(run.words[:4])}` prints, which is not run here"
        return self._error(run.line, problem, "write the value, or the command without the script")

    def _error(self, line: int, problem: str, remedy: str) -> ConfigError:
        file = str(display_path(self.file))
        return ConfigError(show_text(problem), file=f"{file}:{line}" if line else file, remedy=remedy)
