"""The environment of a sandbox. Variables of the settings are set once all rights are given up: `PATH` or `LD_PRELOAD`
would decide which programs and libraries do that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gateway.sandbox.sandbox_layout import ROLLOUT

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": ROLLOUT, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
HELD_BACK = "MTRL_HELD_BACK_"
"""How variables are called until then, with their numbers."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
"""Names that shells pass on."""


def hold_back(variables: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """The variables under other names, without those of ours."""
    return {f"{HELD_BACK}{index}": value for index, value in enumerate(_passed_on(variables, ours).values())}


def held_names(variables: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """The names that variables have until then, with their own."""
    return {f"{HELD_BACK}{index}": name for index, name in enumerate(_passed_on(variables, ours))}


def give_back(variables: Mapping[str, str], ours: Mapping[str, str]) -> Sequence[str]:
    """The command that gives variables their names and goes on as what follows it. It has none of their values, since
    everybody can read command lines."""
    names = held_names(variables, ours).items()
    given = [f'export {name}="${held}"; unset {held}\n' for held, name in names]
    return ("/bin/sh", "-c", f'{"".join(given)}exec "$@"', "sh") if given else ()


def _passed_on(variables: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if NAME.fullmatch(name) and name not in ours}
