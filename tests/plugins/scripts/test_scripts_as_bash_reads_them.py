"""Training commands of scripts are what bash makes of them: branches, arrays, quotes, loops, functions, outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.scripts.launches import UNKNOWN_TEXT
from mtrl_plugins.scripts.script_reader import NO_TRAINING, ScriptReader
from mtrl_plugins.verl.read_config import is_training
from tests.conftest import Write
from tests.plugins.scripts.conftest import ReadScript

LAUNCH = "python3 -m verl.trainer.main_ppo"

SCRIPTS = {
    "append to an array": (
        f'ARGS=(a=1)\nARGS+=(b=2)\n[[ -n "" ]] && ARGS+=(c=3)\nS=x; S+=y\n{LAUNCH} "${{ARGS[@]}}" s=$S\n',
        ["a=1", "b=2", "s=xy"],
    ),
    "array line that ends in arithmetic": (
        f"P=10; R=20\nARGS=(\n  a=$((P + R))\n  b=$((R / P)) # a comment\n)\n{LAUNCH} \"${{ARGS[@]}}\"\n",
        ["a=30", "b=2"],
    ),
    "variable before the command": (f"VAR=1 OTHER='2 3' {LAUNCH} a=1\n", ["a=1"]),
    "function and command substitution": (
        f'name() {{ basename "${{1%.*}}" | tr a-z A-Z; }}\n{LAUNCH} n=$(name /x/run.sh) m="$(seq 1 3 | tail -1)"\n',
        ["n=RUN", "m=3"],
    ),
    "strict mode": (
        f"set -xeuo pipefail\nulimit -n 65535\nmkdir -p /no/where logs\n{LAUNCH} a=1 2>&1 | tee logs/x\n", ["a=1"]
    ),
    "in the background": (f"nohup {LAUNCH} a=1 > run.log 2>&1 &\n", ["a=1"]),
    "by ray": (f"ray job submit --working-dir=. -- {LAUNCH} a=1\n", ["a=1"]),
    "by exec and env": (f"exec env X=1 {LAUNCH} a=1\n", ["a=1"]),
    "folders": (
        'cd "$(dirname "${BASH_SOURCE[0]}")/sub" && D=$(pwd)\ncd ../other\n'
        + f"{LAUNCH} d=${{D##*/}} p=${{PWD##*/}}\n",
        ["d=sub", "p=other"],
    ),
    "text of several lines": (
        f"S='a\nb'\n{LAUNCH} s=\"$S\"\ncat > x.py <<EOF\n{LAUNCH} in a text\nEOF\n", ["s=a\nb"]
    ),
    "programs that are not run": (
        f"sleep 9\npip install x\nwget http://x\nhuggingface-cli download x\n{LAUNCH} a=1\n", ["a=1"]
    ),
    "a branch that no argument depends on": (
        f'G=$(nvidia-smi -L | wc -l)\nif [ "$G" -gt 4 ]; then export X=1; fi\n{LAUNCH} a=1\n', ["a=1"]
    ),
    "environment of programs": (
        f"source /opt/x/set_env.sh\nsource activate\nconda activate verl\n{LAUNCH} a=1\n", ["a=1"]
    ),
    "doubled backslashes": (f"{LAUNCH} \\\\\n  a=1 \\\\\n  b=2\n", ["a=1", "b=2"]),
}  # fmt: skip


@pytest.mark.parametrize("construct", SCRIPTS)
def test_command_is_the_one_that_bash_launches(
    construct: str, read_script: ReadScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    text, expected = SCRIPTS[construct]
    [launch] = read_script(text)
    words = list(launch.texts)
    assert words[words.index("verl.trainer.main_ppo") + 1 :] == expected


REFUSED = {
    f"rsync a b\n{LAUNCH} a=1\n": "run.sh:1: calls rsync",
    f"x=1\n/opt/bin/tool --init || true\n{LAUNCH} a=1\n": "run.sh:2: calls a program",
    f"source common.sh\n{LAUNCH} a=1\n": "run.sh:1: reads common.sh",
    f"set -u\n{LAUNCH} a=$MISSING_VARIABLE\n": "run.sh:2: bash stopped: MISSING_VARIABLE: unbound",
    f"if [ $(nproc) -gt 4 ]; then X='a=1 b=2'; fi\n{LAUNCH} $X\n": (
        "run.sh:1: the training command depends on what `nproc`"
    ),
    f"if command -v nvidia-smi; then {LAUNCH} a=1; else {LAUNCH} a=1 b=2; fi\n": "depends on what",
    f"if true; then\n{LAUNCH} a=1\n": "bash stopped: syntax error",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_known_is_refused_with_its_line(text: str, read_script: ReadScript) -> None:
    with pytest.raises(ConfigError) as caught:
        read_script(text)
    assert REFUSED[text] in str(caught.value)


def test_output_that_is_not_known_is_marked_in_its_word(read_script: ReadScript) -> None:
    [launch] = read_script(f'{LAUNCH} n=$(nproc) b="x$(git rev-parse HEAD)y" a=1\n')
    assert launch.texts[3:] == (f"n={UNKNOWN_TEXT}", f"b=x{UNKNOWN_TEXT}y", "a=1")


def test_words_have_the_lines_where_they_are_written(read_script: ReadScript) -> None:
    text = f'# a=9\nARGS=(\n  a=1\n)\nB=4\n{LAUNCH} \\\n  "${{ARGS[@]}}" \\\n  b=$B\n'
    [launch] = read_script(text)
    places = {word.text: word.place for word in launch.words}
    assert (places["b=4"], launch.place) == ("run.sh:8", "run.sh:6")
    assert places["a=1"] == ("run.sh:3")


def test_exported_variables_are_those_of_the_command(read_script: ReadScript) -> None:
    [launch] = read_script(f"export A=1\nB=2\nC=3 {LAUNCH} a=1\n")
    assert {name: word.text for name, word in launch.environment.items() if name in "ABC"} == {"A": "1", "C": "3"}


def test_several_training_commands_ask_for_one(write: Write) -> None:
    write("run.sh", f"{LAUNCH} seed=1\n{LAUNCH} seed=1\n{LAUNCH} \\\n  seed=2\n")
    reader = ScriptReader(tell=lambda line: None)
    with pytest.raises(ConfigError) as caught:
        reader.read("run.sh", is_training, NO_TRAINING)
    assert "run.sh: launches 2 different training commands: 1 at line 1: seed=1; 2 at line 3: seed=2" in str(
        caught.value
    )
    assert "such as run.sh#1" in str(caught.value)
    assert reader.read("run.sh#2", is_training, NO_TRAINING).texts[-1] == "seed=2"
    with pytest.raises(ConfigError, match="there is no training command 3"):
        reader.read("run.sh#3", is_training, NO_TRAINING)


def test_reading_is_told_before_with_the_variables_that_bash_gets(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_ROOT", "/data")
    monkeypatch.setenv("MY_TOKEN", "private-text")
    file, told = write("run.sh", f"{LAUNCH} a=$DATA_ROOT t=$MY_TOKEN\n"), list[str]()
    [launch] = ScriptReader(tell=told.append).read_all(Path(file.name), is_training)
    assert launch.texts[-2:] == ("a=/data", f"t={UNKNOWN_TEXT}")
    assert len(told) == 1 and "run.sh" in told[0] and "private-text" not in told[0]
    assert "it gets DATA_ROOT of your environment" in told[0]


def test_where_bash_cannot_be_confined_scripts_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrl_plugins.scripts.confine.can_confine", lambda: False)
    monkeypatch.setattr("subprocess.Popen", None)
    file = write("run.sh", f"{LAUNCH} a=1\n")
    with pytest.raises(ConfigError, match="install bash and bubblewrap"):
        ScriptReader().read_all(Path(file.name), is_training)


def test_text_that_is_no_script_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    write("null.sh", "a\0b")
    for name, problem in (
        ("binary.sh", "cannot be read"),
        ("missing.sh", "cannot be read"),
        ("null.sh", "is not a script"),
    ):
        with pytest.raises(ConfigError, match=problem):
            ScriptReader().read_all(tmp_path / name, is_training)
