"""Programs that forge the success of an assertion fail it: nothing that decides is where they are."""

from __future__ import annotations

import anyio
import pytest

from gateway.feedback.program_runner import ProgramLimits, run_assertion
from gateway.sandbox.python_programs import find_confinement

EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
FORGED = {
    "an object that equals everything": (f"{EQUAL}def f(x): return Equal()", "assert f(2) == 4"),
    "the same on the right": (f"{EQUAL}def f(x): return Equal()", "assert 4 == f(2)"),
    "in a list": (f"{EQUAL}def f(x): return [Equal()]", "assert f(2) == [4]"),
    "in a dictionary": (f"{EQUAL}def f(x): return {{'a': Equal()}}", "assert f(2) == {'a': 4}"),
    "among others": (f"{EQUAL}def f(x): return Equal()", "assert f(2) in (4, 5)"),
    "a number that equals everything": ("class N(int):\n    def __eq__(s, o): return True\nf = N", "assert f(2) == 4"),
    "an object that is never unequal": (
        "class N:\n    def __ne__(s, o): return False\ndef f(x): return N()",
        "if f(2) != 4:\n    raise AssertionError",
    ),
    "an object that is greater than everything": (
        "class N:\n    def __gt__(s, o): return True\ndef f(x): return N()",
        "assert f(2) > 3",
    ),
    "a difference that is always nothing": (
        "class N:\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\ndef f(x): return N()",
        "assert abs(f(2) - 4) < 1e-6",
    ),
    "a remainder that is always nothing": (
        "class N:\n    def __mod__(s, o): return 0\ndef f(x): return N()",
        "assert f(2) % 4 == 0",
    ),
    "an object that has everything": (
        "class N:\n    def __contains__(s, o): return True\n    def __iter__(s): return iter(())\ndef f(x): return N()",
        "assert 4 in f(2)",
    ),
    "a truth that is no bool": (
        "class N:\n    def __eq__(s, o): return 'yes'\ndef f(x): return N()",
        "assert f(2) == f(3)",
    ),
    "another abs": ("def f(x): return 3\ndef abs(x): return 0", "assert abs(f(2) - 4) < 1e-6"),
    "another all": ("def f(x): return 3\ndef all(x): return True", "assert all(f(x) == 2 * x for x in range(3))"),
    "another math": (
        "class math:\n    @staticmethod\n    def isclose(*_): return True\ndef f(x): return 3",
        "assert math.isclose(f(2), 4)",
    ),
    "code as a value": ("f = exec\ndef g(x): return 'raise SystemExit'", "assert f(g(2)) == 4"),
    "exit": ("import sys\ndef f(x): sys.exit(0)", "assert f(2) == 4"),
    "exit where exceptions are caught": (
        "import os\ndef f(x): os._exit(0)",
        "try:\n    f(2)\n    assert False\nexcept Exception:\n    pass\nexcept BaseException:\n    pass",
    ),
    "an exception that is an exit": ("def f(x): raise SystemExit(0)", "assert f(2) == 4"),
    "its own source": (
        "import sys\ndef f(x):\n    return int(open(sys.argv[0]).read().split('== ')[-1].split()[0])",
        "assert f(2) == 4",
    ),
    "the frames above": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 4 in frame.f_locals.values(): return 4\n        frame = frame.f_back\n"
        "    return 3",
        "assert f(2) == 4",
    ),
    "a verdict of its own": (
        'print(\'{"is_broken": false, "problem": null}\', flush=True)\nimport os; os._exit(0)',
        "assert f(2) == 4",
    ),
    "a verdict in the pipes": (
        "import os\nfor fd in range(3, 20):\n    try:\n"
        '        os.write(fd, b\'{"is_broken": false, "problem": null}\\n\' * 9)\n    except OSError: pass\n',
        "assert f(2) == 4",
    ),
    "messages of any kind": (
        "import os, json\nfor fd in range(3, 20):\n    try:\n"
        '        for value in ({"builtin": "eval"}, {"yours": 0}, {"standard": ["__main__", "x"]}, {}):\n'
        '            os.write(fd, json.dumps({"value": value, "changed": []}).encode() + b"\\n")\n'
        "    except OSError: pass\n",
        "assert f(2) == 4",
    ),
    "an endless message": (
        "import os\nwhile True:\n    for fd in range(3, 20):\n        try:\n            os.write(fd, b'[' * 99999)\n"
        "        except OSError: pass\n",
        "assert f(2) == 4",
    ),
    "a code that the assertion calls": (
        "import os, json\ndef g(x): return \"__import__('os')._exit(0)\"\nf = eval",
        "assert f(g(1)) == 4",
    ),
}
"""A program and the assertion that it must not pass."""


@pytest.mark.parametrize("trick", FORGED)
async def test_forged_success_fails(trick: str) -> None:
    program, assertion = FORGED[trick]
    with anyio.fail_after(60):
        limits = ProgramLimits(wall_s=20.0, cpu_s=10)
        assert await run_assertion(program, assertion, "", limits, find_confinement() or "none") is not None
