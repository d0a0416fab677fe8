"""Without bash, simple scripts are read exactly, and everything else is refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.scripts.script_reader import ScriptReader
from mtrl_plugins.scripts.word import UNKNOWN_TEXT, Launch
from mtrl_plugins.verl.read_config import is_training
from tests.conftest import Write

LAUNCH = "python3 -m verl.trainer.main_ppo"


def read(write: Write, text: str) -> list[Launch]:
    return ScriptReader(use_bash=False).read_all(Path(write("run.sh", text).name), is_training)


UNDERSTOOD = {
    f"A=1 # one\nexport B='two words'\n{LAUNCH} a=$A b=\"$B\" c=$B 'd=$A' e=\\$A": [
        "a=1", "b=two words", "c=two", "words", "d=$A", "e=$A"
    ],
    f"f=x\n{LAUNCH} data=\"['$f']\" list=[a,$f] q=\"a\\\"b\" e=": ["data=['x']", "list=[a,x]", 'q=a"b', "e="],
    f"P=10\nA=(\n a=$((P * 2 + 1)) # 21\n 'b=2 3'\n)\n{LAUNCH} \"${{A[@]}}\" $@ \"$@\" c=${{P:-3}} d=${{Q:-$P}}": [
        "a=21", "b=2 3", "c=10", "d=10"
    ],
    f"set -x\nulimit -n 9\nX=1 Y=2 {LAUNCH} \\\n  a=1 \\\n  # b=2\n": ["a=1"],
    f"pip install x; sleep 1\n{LAUNCH} a=1 2>&1 | tee run.log\necho done": ["a=1"],
    f"nohup {LAUNCH} a=1 > log 2> errors &\nwait": ["a=1"],
    f"N=$(nproc)\n{LAUNCH} n=$N b=`date` c=${{X//a/b}} d=$((9**9**9)) p=$(pwd)/x": [
        f"n={UNKNOWN_TEXT}", f"b={UNKNOWN_TEXT}", f"c={UNKNOWN_TEXT}", f"d={UNKNOWN_TEXT}", "p=HERE/x"
    ],
    f"S='a\nb'\n{LAUNCH} s=\"$S\" u=$UNSET_VARIABLE": ["s=a\nb", "u="],
    f"{LAUNCH} a={{b:1}} h=~/x t=${{HOME}}/y\nexit\nif never": ["a={b:1}", "h=~/x", "t=/h/y"],
}  # fmt: skip


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_simple_script_is_read_as_bash_reads_it(
    text: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    [launch] = read(write, text)
    texts = list(launch.texts)
    assert texts[texts.index("verl.trainer.main_ppo") + 1 :] == [
        word.replace("HERE", str(tmp_path)) for word in UNDERSTOOD[text]
    ]


NOT_UNDERSTOOD = {
    "if true; then X=1; fi": "`if` is not understood",
    "for i in 1 2; do X=$i; done": "`for` is not understood",
    "while true; do X=1; done": "`while` is not understood",
    "case x in x) X=1;; esac": "`case` is not understood",
    "f() { X=1; }": "`(` is not understood",
    "function f { X=1; }": "`function` is not understood",
    "{ X=1; }": "`{` is not understood",
    "(X=1)": "`(` is not understood",
    "X+=1": "this assignment is not understood",
    "A+=(b=1)": "this assignment is not understood",
    "A[0]=1": "this assignment is not understood",
    "true && X=1": "`&&` is not understood",
    "false || X=1": "`||` is not understood",
    "[ -f x ]": "`[` is not understood",
    "[[ -f x ]]": "`[[` is not understood",
    "eval X=1": "`eval` is not understood",
    "source x.sh": "`source` is not understood",
    ". x.sh": "`.` is not understood",
    "read X": "`read` is not understood",
    "set -- a=1": "`set -- a=1` is not understood",
    "cat <<EOF\nX=1\nEOF": "`<<` is not understood",
    "cat <(echo)": "`<(` is not understood",
    "echo {1..3}": "braces are not understood",
    "declare -A M": "`declare -A M` is not understood",
    "unset X": "`unset X` is not understood",
    "make x": "`make` is not understood",
    "echo x | read X": "`read` is not understood",
    "X='": "a quote",
    "A=(x": "an array is not closed",
    "X=$(echo": ") is missing",
}


@pytest.mark.parametrize("line", NOT_UNDERSTOOD)
def test_what_only_bash_understands_is_refused_with_its_line(line: str, write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write, f"set -x\n{line}\n{LAUNCH} x=$X\n")
    assert NOT_UNDERSTOOD[line] in str(caught.value) or "is not valid shell" in str(caught.value)
    assert str(caught.value).startswith(("run.sh:2: ", "run.sh:4: ")) and "remedy: " in str(caught.value)


def test_text_without_a_script_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    for name, problem in (("binary.sh", "cannot be read"), ("missing.sh", "cannot be read")):
        with pytest.raises(ConfigError, match=problem):
            ScriptReader(use_bash=False).read_all(tmp_path / name, is_training)
    with pytest.raises(ConfigError, match="is not a script"):
        read(write, "a\0b")
