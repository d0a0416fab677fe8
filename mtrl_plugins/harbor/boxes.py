"""What a Harbor task says about its boxes, as settings of sandboxes, graders and MCP servers. Raises ConfigError."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from gateway.config.models import Server
from gateway.errors import ConfigError
from gateway.sandbox.grade_settings import GradeSettings
from gateway.sandbox.host_rules import HostRules
from gateway.sandbox.roots import find_root, find_workdir
from gateway.sandbox.sandbox_settings import SandboxSettings, check_environment
from mtrl_plugins.harbor.settings import HarborSettings
from mtrl_plugins.harbor.task_file import CONFIG, DOCKERFILE, Environment, HarborTask, Network, StepTable
from mtrl_plugins.harbor.users import BoxUser, find_user

LOGS, ARTIFACTS, AGENT_LOGS = "/logs/verifier", "/logs/artifacts", "/logs/agent"
TEST = f"chmod +x /tests/test.sh; (/tests/test.sh) > {LOGS}/test-stdout.txt 2>&1; tail -c 2000 {LOGS}/test-stdout.txt"
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-(.*?))?\}", re.DOTALL)
TESTS_S, MOST_S, ARTIFACT_MB = 600.0, 3600.0, 256
"""`MOST_S`: what tests have at most, and commands before them, whatever the task says."""


class TaskBoxes:
    """The boxes of one task."""

    def __init__(self, settings: HarborSettings, task: HarborTask) -> None:
        self.settings, self.task = settings, task
        environment, folder = task.table.environment, task.folder / "environment"
        root = self._find_root("environment", environment.docker_image, folder, task.name)
        self.policy_boxes, self.test_boxes = list[SandboxSettings](), list[SandboxSettings]()
        """The boxes of each step."""
        self.users, self.testers = list[BoxUser](), list[BoxUser]()
        """Their users."""
        for step in task.steps:
            agent, tester = task.users_of(step)
            phases = [part.agent for part in task.parts_of(step)]
            box = self._make_box("environment", environment, root, [*phases, environment])
            self.policy_boxes.append(self._give_to(self.users, box, "agent.user", agent))
            phases, own, own_root = [part.verifier for part in task.parts_of(step)], environment, root
            if task.is_separate(step):
                own = next((phase.environment for phase in phases if phase.environment), environment)
                own_root = self._find_test_root(step) or root
            box = self._make_box("verifier", own, own_root, [*phases, own])
            self.test_boxes.append(self._give_to(self.testers, box, "verifier.user", tester))
        self.workdir = find_workdir(self.policy_boxes[0])
        self.grades = [self._make_grade(step, user) for step, user in zip(task.steps, self.testers, strict=True)]
        self.instructions = [task.read_instruction(step) for step in task.steps]
        self.servers = [self._make_server(server) for server in task.table.environment.mcp_servers]
        is_uploaded = folder.is_dir() and any(folder.iterdir()) and not (folder / DOCKERFILE).exists()
        self.upload = folder if is_uploaded else None
        """The folder whose files are put into the working folder: that of a task with a ready image."""

    def resolve(self, field: str, values: Mapping[str, str]) -> dict[str, str]:
        """Variables with what `${NAME}` in them stands for."""
        try:
            return check_environment(self._fill_in(field, values))
        except PydanticCustomError as error:
            raise self._error(field, error.message(), "correct it") from error

    def _fill_in(self, field: str, values: Mapping[str, str]) -> dict[str, str]:
        def find(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2]) if match[1] in self.settings.env else match[2]
            if value is None:
                raise self._error(field, f"{match[0]} is not known", f"set it, and name it in `env: [{match[1]}]`")
            return value

        return {name: VARIABLE.sub(find, value) for name, value in values.items()}

    def _make_box(self, field: str, environment: Environment, root: str, phases: list[Network]) -> SandboxSettings:
        most = self.settings.sandbox
        update = {
            "root": root,
            "workdir": environment.workdir or most.workdir,
            "network": self._find_network(field, next((phase for phase in phases if phase.network_mode), Network())),
            "env": {**most.env, **self.resolve(f"{field}.env", environment.env)},
            "memory_mb": max(32, min(most.memory_mb, environment.memory_mb or most.memory_mb)),
            "disk_mb": min(most.disk_mb, environment.storage_mb or most.disk_mb),
            "cpus": min(most.cpus, environment.cpus or most.cpus),
        }
        return most.model_copy(update=update)

    def _give_to(
        self, users: list[BoxUser], box: SandboxSettings, field: str, name: str | int | None
    ) -> SandboxSettings:
        """A box with the home of its user, who is noted."""
        try:
            user = find_user(name, box)
        except (ValueError, OSError) as error:
            raise self._error(field, str(error), "name a user of the image, or remove it") from error
        users.append(user)
        return box.model_copy(update={"env": {"HOME": user.home, **box.env}}) if user.home else box

    def _make_grade(self, step: StepTable | None, user: BoxUser) -> GradeSettings:
        is_separate, verifiers = self.task.is_separate(step), [part.verifier for part in self.task.parts_of(step)]
        values: dict[str, Any] = {
            "command": ("/bin/sh", "-c", user.become + TEST),
            "reward": LOGS,
            "env": self.resolve("verifier.env", {**verifiers[-1].env, **verifiers[0].env}),
            "timeout_s": min(verifiers[0].timeout_sec or TESTS_S, MOST_S),
            "mode": "fresh" if is_separate else "same",
        }
        if not (is_separate and self._find_test_root(step)):  # Such an image has its tests.
            folders = self.task.tests_of(step)
            values["files"] = {"/tests": folders[0]} if folders else {}
            values["files"] |= {f"/tests/{path.name}": path for folder in folders[1:] for path in folder.iterdir()}
        if is_separate:
            sources = [source for part in self.task.parts_of(step) for source in part.artifacts]
            places = [source if source.startswith("/") else f"{self.workdir}/{source}" for source in sources]
            values |= {"artifacts": [ARTIFACTS, *places], "artifact_mb": ARTIFACT_MB}
        try:
            return GradeSettings.model_validate(values)
        except ValidationError as error:
            raise self._error("artifacts", str(error.errors(include_url=False)[0]["msg"]), "correct it") from error

    def _make_server(self, given: Mapping[str, Any]) -> tuple[str, Server]:
        field = f"environment.mcp_servers.{given.get('name', '')}"
        try:
            url, headers = urlsplit(given["url"]), self._fill_in(f"{field}.headers", given.get("headers", {}))
            values = {"url": given["url"], "transport": given.get("transport", "sse"), "headers": headers}
            made = Server.model_validate({**values, "isolation": "session"})
            port = url.port or (443 if url.scheme == "https" else 80)
            rules = HostRules(self.settings.mcp_hosts).rules
            is_allowed = any(rule.host == url.hostname and port in rule.ports for rule in rules)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise self._error(field, f"it cannot be reached: {error}", "give its `url`") from error
        if not is_allowed:
            problem = f"{url.netloc!r:.80} is not among the hosts of MCP servers by its whole name"
            remedy = f'allow it with `environment: {{mcp_hosts: ["{url.netloc}"]}}`'
            raise self._error(field, problem, remedy)  # Others may lead to this machine.
        return str(given.get("name", "server")), made

    def _find_network(self, field: str, policy: Network) -> tuple[str, ...] | str:
        allowed = self.settings.sandbox.hosts
        if policy.network_mode != "allowlist":
            return "loopback" if policy.network_mode == "no-network" else allowed or "loopback"
        hosts = tuple(f"[{host}]" if host.count(":") > 1 else host for host in policy.allowed_hosts)
        for host in hosts:
            try:
                if not HostRules(allowed).includes(host):
                    raise self._refuse_host(f"{field}.allowed_hosts", host)
            except ValueError as error:
                raise self._error(f"{field}.allowed_hosts", f"cannot be kept to: {error}", "name hosts") from error
        return hosts or "loopback"

    def _find_test_root(self, step: StepTable | None) -> str:
        """The root of tests that have an image of their own; empty for those that are put into the policy's."""
        for part, folder in zip(self.task.parts_of(step), self.task.folders_of(step), strict=True):
            environment, own = part.verifier.environment, self.task.name + (f"-{step.name}" if step else "")
            if (environment and environment.docker_image) or (folder / "tests" / DOCKERFILE).is_file():
                image = environment.docker_image if environment else ""
                return self._find_root(
                    "verifier.environment", image, folder / "tests", f"{own}-tests", falls_back=False
                )
        return ""

    def _find_root(self, field: str, image: str, folder: Path, own: str, *, falls_back: bool = True) -> str:
        """The root of an image, or of a Dockerfile, which has a name of its own."""
        sandbox, roots = self.settings.sandbox, self.settings.roots
        default = re.sub(r"[^a-z0-9._-]+", "-", (image or own).lower()).strip("._-")[:100]
        root = roots.get(own) or roots.get(image) or default
        if sandbox.provider is not None and not sandbox.provider.is_local:
            return root
        try:
            return find_root(root).name
        except ConfigError as error:
            if sandbox.root and root == default and falls_back:
                return find_root(sandbox.root).name
            get = f"docker pull {image}" if image else f"docker build -t {root} {folder}"
            make = f"{get} && docker save {image or root} -o {root}.tar && mtrl-gateway roots add {root} {root}.tar"
            problem = f"there is no root {root!r} of {image or folder / DOCKERFILE}"
            remedy = f"run `{make}`, or name another one in `environment.roots`"
            raise self._error(f"{field}.docker_image", problem, remedy) from error

    def _refuse_host(self, field: str, host: str) -> ConfigError:
        problem = f"{host!r:.80} is not among the hosts that tasks may reach"
        return self._error(field, problem, f'allow it with `environment.sandbox: {{network: ["{host}"]}}`')

    def _error(self, field: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, file=self.task.folder / CONFIG, field=field, remedy=remedy)
