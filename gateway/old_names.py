"""Old import paths: modules that were renamed can still be imported, with a warning that names the new path."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED: Mapping[str, str] = {
    "gateway.feedback.score": "gateway.feedback.gsm8k",
    "gateway.native.gsm8k_tool": "mtrl_plugins.verl.gsm8k_rule",
    "gateway.upstream": "gateway.mcp_client",
    "gateway.upstream.hook": "gateway.mcp_client.parse_hook",
    "trainer.parse.family": "trainer.parse.base",
    "trainer.steps": "trainer.rollout.steppers",
    "mtrl_plugins.swift.reward": "mtrl_plugins.swift.orm",
    "mtrl_plugins.swift.scales": "mtrl_plugins.swift.loss_scale",
    "mtrl_plugins.verl.reward": "mtrl_plugins.verl.reward_function",
}
RENAMED_MEMBERS: Mapping[str, Mapping[str, str]] = {"trainer.parse.base": {"Family": "CallParser"}}
"""By new module: old names of classes, which it gets when it is imported by its own old name."""


class OldNames(MetaPathFinder, Loader):
    """Finds a module by its old name, after all other finders have failed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a renamed module, or None."""
        return ModuleSpec(fullname, self) if fullname in RENAMED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The renamed module itself, so that its classes are the same under both names."""
        module = import_module(RENAMED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Puts back the module's own spec, which the import system has replaced, and warns."""
        if spec := module.__spec__:
            module.__spec__ = spec.loader_state
            for old, new in RENAMED_MEMBERS.get(RENAMED[spec.name], {}).items():
                setattr(module, old, getattr(module, new))
            warnings.warn(f"{spec.name} was renamed: import {RENAMED[spec.name]}", FutureWarning, stacklevel=2)


sys.meta_path.append(OldNames())
