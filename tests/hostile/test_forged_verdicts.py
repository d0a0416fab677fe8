"""Programs that forge the success of an assertion fail it, where it compares a value with a literal."""

from __future__ import annotations

import anyio
import pytest

from gateway.feedback.code import CodeInteraction, CodeTest

EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
FORGED = {
    "an object that equals everything": (f"{EQUAL}def f(x): return Equal()", "assert f(2) == 4"),
    "in a list": (f"{EQUAL}def f(x): return [Equal()]", "assert f(2) == [4]"),
    "a number that equals everything": ("class N(int):\n    def __eq__(s, o): return True\nf = N", "assert f(2) == 4"),
    "code as a value": ("f = exec\ndef g(x): return 'raise SystemExit'", "assert f(g(2)) == 4"),
    "exit": ("import sys\ndef f(x): sys.exit(0)", "assert f(2) == 4"),
    "exit where exceptions are caught": (
        "import os\ndef f(x): os._exit(0)",
        "try:\n    f(2)\n    assert False\nexcept Exception:\n    pass\nexcept BaseException:\n    pass",
    ),
    "reports of its own": (
        "import os, sys\nframe = sys._getframe()\nwhile 'mark' not in frame.f_locals: frame = frame.f_back\n"
        "mark = frame.f_locals['mark']\nfor n in range(9):\n    print(f'{mark} 0 {n:016x}')\n"
        "sys.stdout.flush()\nframe.f_globals['run']('', '', mark)\nos._exit(0)",
        "assert f(2) == 4",
    ),
    "broken reports": (
        "import os, sys\nframe = sys._getframe()\nwhile 'mark' not in frame.f_locals: frame = frame.f_back\n"
        "mark = frame.f_locals['mark']\nprint(f'{mark}\\n{mark} 0\\n{mark} 0 1 2\\n{mark} 99999 x\\n{mark} x \\0')\n"
        "sys.stdout.flush()\nframe.f_globals['run']('', '', mark)\nos._exit(0)",
        "assert f(2) == 4",
    ),
    "another digest": (
        "import sys\nframe = sys._getframe()\nwhile 'mark' not in frame.f_locals: frame = frame.f_back\n"
        "frame.f_globals['digest'] = lambda value: '0' * 16\ndef f(x): return 3",
        "assert f(2) == 4",
    ),
}
"""A program and the assertion that it must not pass."""


@pytest.mark.parametrize("trick", FORGED)
async def test_forged_success_fails(trick: str) -> None:
    program, assertion = FORGED[trick]
    with anyio.fail_after(60):
        interaction = CodeInteraction({"wall_s": 20, "cpu_s": 10})
        assert await interaction._run_test(program, CodeTest(assertion=assertion), 20.0) is not None
