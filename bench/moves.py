"""How many of a folder's scripts for verl and ms-swift are read as bash reads them, and translated or refused.

    python bench/moves.py FOLDER...                   # such as a clone of verl, or of ms-swift
    python bench/moves.py FOLDER --add data.train_files=rows.parquet --add trainer.total_training_steps=10

Each script's training command is compared with that of an ordinary bash, which sees the whole system read-only, has no
network, and finds programs that only write down their arguments. Without bubblewrap nothing is compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.errors import ConfigError, ConfigErrors  # noqa: E402
from mtrl_plugins.scripts.launches import UNKNOWN_TEXT  # noqa: E402
from mtrl_plugins.scripts.script_reader import ScriptReader, is_swift, read_script_text  # noqa: E402
from mtrl_plugins.scripts.translate import translate  # noqa: E402
from mtrl_plugins.swift import read_script as swift  # noqa: E402
from mtrl_plugins.swift.conversions import SWIFT_TABLE  # noqa: E402
from mtrl_plugins.verl import read_config as verl  # noqa: E402
from mtrl_plugins.verl.conversions import VERL_TABLE  # noqa: E402

PROGRAMS = ("python", "python3", "ray", "swift", "megatron", "torchrun", "nohup", "accelerate", "deepspeed", "srun")
QUIET = (
    "sleep",
    "cp",
    "mv",
    "rm",
    "touch",
    "nvidia-smi",
    "pip",
    "pip3",
    "wget",
    "curl",
    "huggingface-cli",
    "conda",
    "npu-smi",
    "git",
)
RECORDER = '#!/bin/bash -p\n{ printf "%s\\0" "${0##*/}" "$@"; printf "\\0end\\0"; } >> /tmp/records\n'
NOT_TRAINING = "launches no training that mtrl can do"


@dataclass(frozen=True)
class Row:
    """What became of one script."""

    script: str
    argv: str
    """`equal`, `other`, or `-` where there is nothing to compare."""
    outcome: str
    reasons: Sequence[str]


def main() -> None:
    """Prints a table of all scripts, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--add", action="append", default=[], metavar="KEY=VALUE", help="added to every command")
    options = parser.parse_args()
    rows: list[Row] = []
    for folder in [folder.resolve() for folder in options.folders]:
        rows += [print_row(row) for row in check_folder(folder, added=options.add)]
    print_sums(rows)


def check_folder(folder: Path, *, added: Sequence[str]) -> Iterator[Row]:
    """A row for every script that has a training command of either framework in its text."""
    os.chdir(folder)
    for file in sorted(Path().rglob("*.sh")):
        if any(name in file.read_text(errors="replace") for name in ("main_ppo", "main_dapo", "rlhf_type grpo")):
            yield check_script(file, added=added)


def check_script(file: Path, *, added: Sequence[str]) -> Row:
    """Compares a script's commands, and translates the first."""
    told: list[str] = []
    reader = ScriptReader(told.append)
    of_swift = is_swift([str(file)])
    wanted = (lambda words: swift.find_program(words) is not None) if of_swift else verl.is_training
    try:
        found = [launch.texts for launch in reader.read_all(file, wanted)]
    except ConfigError as error:
        return Row(str(file), "-", "refused", reasons(error))
    expected = [words for words in ordinary_launches(file) if wanted(words)]
    argv = (
        "-"
        if shutil.which("bwrap") is None or not (found or expected)
        else "equal"
        if are_equal(found, expected)
        else "other"
    )
    if not found:
        return Row(str(file), argv, "refused", [NOT_TRAINING])
    name = str(file) if len(set(found)) == 1 or of_swift else f"{file}#1"
    try:
        if of_swift:
            translate(swift.read_command([name, *added], reader), SWIFT_TABLE)
        else:
            translate(verl.read_command([name, *added], reader), VERL_TABLE)
    except ConfigError as error:
        return Row(str(file), argv, "refused", reasons(error))
    return Row(str(file), argv, "translated", [])


def are_equal(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> bool:
    """True if all words are equal, up to text that is marked as unknown."""
    found, expected = sorted(map(list, found)), sorted(map(list, expected))  # Those in the background mix.
    return len(found) == len(expected) and all(
        len(mine) == len(theirs) and all(map(is_equal, mine, theirs))
        for mine, theirs in zip(found, expected, strict=True)
    )


def is_equal(mine: str, theirs: str) -> bool:
    """True if a word is the other one, in which a mark of unknown text stands for anything."""
    start, _, end = mine.partition(UNKNOWN_TEXT)
    return mine == theirs or (UNKNOWN_TEXT in mine and theirs.startswith(start) and theirs.endswith(end))


def ordinary_launches(file: Path) -> list[list[str]]:
    """The commands that an ordinary bash launches, in a working folder that is empty."""
    if shutil.which("bwrap") is None:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        bin_folder, script = Path(scratch, "bin"), Path(scratch, "script")
        bin_folder.mkdir()
        script.write_text(read_script_text(file))
        for name in (*PROGRAMS, *QUIET):
            (bin_folder / name).write_text(RECORDER if name in PROGRAMS else "#!/bin/bash -p\n")
            (bin_folder / name).chmod(0o755)
        here = Path.cwd()
        words = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev"]
        words += ["--tmpfs", str(Path.home()), "--tmpfs", "/tmp", "--bind", scratch, "/tmp", "--dir", "/tmp/x"]
        words += ["--tmpfs", str(here), "--ro-bind", str(script), str(here / file), "--chdir", str(here)]
        path = f"/tmp/bin:{os.environ['PATH']}"
        Path(scratch, "env").write_text('source() { [ ! -r "$1" ] || builtin source "$@"; }\n')
        call = [
            *words,
            "--setenv",
            "BASH_ENV",
            "/tmp/env",
            "bash",
            "-c",
            'bash "$1"; sleep 0.1; /bin/sleep 0.1',
            "bash",
            str(file),
        ]
        with open(os.devnull) as nothing:
            subprocess.run(
                call, stdin=nothing, capture_output=True, timeout=60, check=False, env={**os.environ, "PATH": path}
            )
        records = Path(scratch, "records")
        text = records.read_text() if records.exists() else ""
    return [command.split("\0") for command in text.split("\0\0end\0")[:-1]]


def reasons(error: ConfigError) -> list[str]:
    """Each error as one line: the key, and what is wrong."""
    errors = error.errors if isinstance(error, ConfigErrors) else (error,)
    return [f"{each.field}: {each.problem}" if each.field else f"{each.file}: {each.problem}" for each in errors]


def print_row(row: Row) -> Row:
    """Prints a script's line, and a line for each reason."""
    print(f"{row.argv:6} {row.outcome:11} {row.script}")
    for reason in row.reasons:
        print(f"{'':19}{reason}")
    return row


def print_sums(rows: Sequence[Row]) -> None:
    """Prints how many scripts were read and translated, and the most frequent reasons."""
    argv, outcomes = Counter(row.argv for row in rows), Counter(row.outcome for row in rows)
    print(f"\n{len(rows)} scripts: argv equal to bash's {argv['equal']}, other {argv['other']}, none {argv['-']}")
    print(f"translated {outcomes['translated']}, refused {outcomes['refused']}")
    for reason, count in Counter(reason for row in rows for reason in row.reasons).most_common(40):
        print(f"{count:5}  {reason}")


if __name__ == "__main__":
    main()
