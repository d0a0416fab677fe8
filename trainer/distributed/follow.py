"""The program of every rank but the first: connects to rank 0, and carries out its commands until the end."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.connect_ranks import ProcessGroupRanks, connect_ranks
from trainer.distributed.end_stuck_rank import FollowerWatch
from trainer.distributed.errors import ReportedRankError
from trainer.distributed.fingerprint import digest_model, find_versions
from trainer.distributed.rank_commands import Command, FollowerChannel, read_batch
from trainer.distributed.rank_environment import LAUNCHED, RankEnvironment, detect_environment
from trainer.distributed.rank_failures import describe_failure, print_failure
from trainer.distributed.rank_output import copy_output, rank_log
from trainer.distributed.settings import DistributedSettings
from trainer.distributed.sharded_policy import ShardedPolicy
from trainer.model import configure_torch
from trainer.policy.memory_plan import free_memory
from trainer.policy.settings import PolicyError, UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.pretrained import trust_code
from trainer.vision.image_processor import ImageProcessor

LOOK_S = 70.0
"""For how long a rank looks for a file that another machine has just made: NFS may remember for a minute that it, or
its folder, was not there."""
LOOK_POLL_S = 0.5


class Follower:
    """A rank's policy and updater, and what it does at each command."""

    def __init__(self, ranks: ProcessGroupRanks, settings: Mapping[str, Any] | None, problem: str) -> None:
        """`settings` are those that this rank was started with, `problem` what is wrong with them, if anything."""
        self._ranks, self._settings, self._problem = ranks, settings, problem
        self._policy: ShardedPolicy | None = None
        self._updater: PolicyUpdater | None = None

    @property
    def handlers(self) -> Mapping[str, Callable[[Command], Any]]:
        """What to do, by the command's name."""
        return {
            "check": self._check,
            "load": self._load,
            "updater": self._build_updater,
            "train_step": self._train_step,
            "weights": lambda _: _discard(self.policy.gather_weights()),
            "adapters": lambda _: _discard(self.policy.gather_adapters()),
            "bucket": lambda command: _discard(self.policy.gather_bucket(**command.arguments)),
            "keep_weights": lambda _: self.policy.keep_weights(),
            "save": lambda command: _discard(self.policy.save_shards(Path(command.arguments["folder"]))),
            "load_shards": lambda command: self.policy.load_shards(Path(command.arguments["folder"])),
            "resume": lambda command: self.policy.scatter_state({}, {"steps": command.arguments["steps"]}),
            "logprobs": self._compute_logprobs,
        }

    @property
    def policy(self) -> ShardedPolicy:
        """The policy, once it is loaded."""
        if self._policy is None:
            raise PolicyError("this rank has no policy yet", "report this")
        return self._policy

    def _check(self, command: Command) -> Mapping[str, Any]:
        model = Path(command.arguments["model"])
        problem = self._problem
        if not problem and not model.is_dir():
            problem = f"the model's folder {model} is not there; copy it to all machines, or share it"
        mark = Path(command.arguments["mark"])
        if not problem and not self._finds(mark):
            problem = (
                f"the run's folder {mark.parent.parent} is another one here; put it on a disk that all machines share"
            )
        elif not problem and LAUNCHED not in os.environ:
            copy_output(rank_log(mark.parent, self._ranks.rank))
        return {
            "problem": problem,
            "versions": find_versions(),
            "settings": self._settings,
            "model files": digest_model(model) if model.is_dir() else {},
            "free": free_memory(),
        }

    def _finds(self, file: Path) -> bool:
        deadline = time.monotonic() + min(LOOK_S, self._ranks.settings.timeout_s / 2)  # Rank 0 waits for the answer.
        while not file.exists():
            if time.monotonic() > deadline:
                return False
            _refresh(file)
            time.sleep(LOOK_POLL_S)
        return True

    def _load(self, command: Command) -> None:
        folder, values = Path(command.arguments["model"]), command.arguments["update"]
        if command.arguments["trusts_code"]:
            trust_code(folder)
        self._policy = ShardedPolicy(
            folder, UpdateSettings.model_validate(values), self._ranks, ImageProcessor.load(folder)
        )

    def _build_updater(self, command: Command) -> None:
        arguments = dict(command.arguments)
        algorithm = AlgorithmSettings.model_validate(arguments.pop("algorithm"))
        self._updater = PolicyUpdater(self.policy, algorithm, **arguments)

    def _train_step(self, command: Command) -> None:
        if self._updater is None:
            raise PolicyError("this rank has no updater yet", "report this")
        self._updater.train_step(read_batch(command.content))

    def _compute_logprobs(self, command: Command) -> None:
        images = pickle.loads(command.content)  # noqa: S301 - as in `read_batch`
        self.policy.compute_logprobs(command.arguments["ids"], images)


def follow(
    environment: RankEnvironment,
    distributed: DistributedSettings,
    settings: Mapping[str, Any] | None = None,
    problem: str = "",
) -> int:
    """Runs this rank; returns its exit code. Rank 0 tells all errors that it can know of, so that each is told once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 ends the others.
    configure_torch()
    has_own_log = environment.launcher == "--ranks"
    try:
        ranks, names = connect_ranks(environment, distributed)
    except Exception as error:
        if has_own_log:
            traceback.print_exc()
        elif not isinstance(error, ReportedRankError):
            print_failure(describe_failure(environment.rank, error))
        return 1
    try:
        with ranks.watchdog.watching([0], FollowerWatch(ranks, names[0]).look):
            FollowerChannel(ranks).serve(Follower(ranks, settings, problem).handlers)
        ranks.close()
    except Exception:
        if has_own_log:
            traceback.print_exc()
        return 1
    return 0


def _refresh(file: Path) -> None:
    """Lists the folders above a file, for which NFS asks the server about them anew."""
    for folder in reversed(list(file.parents)[:3]):
        with suppress(OSError):
            os.listdir(folder)


def _discard(_: object) -> None:
    """What other ranks than 0 gather is nothing."""


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> int:
    """Runs a rank that `--ranks N` started: its settings are the first line of the standard input."""
    environment = detect_environment()
    if environment is None or LAUNCHED not in os.environ:
        sys.stderr.write("this program is started by `mtrl-train --ranks N`\n")
        return 2
    distributed = DistributedSettings.model_validate(json.loads(sys.stdin.buffer.readline()))
    Thread(target=_end_with_parent, daemon=True).start()
    return follow(environment, distributed)


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # At once: threads of libraries must not hold up the end of the run.
