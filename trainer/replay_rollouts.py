"""`mtrl-train replay` for collected rollouts: replays them from tape and ledgers, and compares the ids."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import cast, get_args

import anyio.lowlevel
from rich.console import Console

from gateway.errors import ConfigError
from gateway.tape import ReplayGateway
from gateway.types import Image
from trainer.engine.base import EngineError, FinishReason, Generation, OnIds, Sampling
from trainer.engine.scripted import ScriptedEngine
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutSettings
from trainer.setup import load_data, load_template, make_sampling, make_stepper, trust_model
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import load_run_settings


async def replay_rollouts(run: Path, console: Console) -> bool:
    """Returns True if every rollout has the same ids, masks, stop reasons and rewards as recorded."""
    settings = load_run_settings(run, RolloutSettings, "mtrl-train rollout")
    if not (run / "tape").exists():
        raise ConfigError("has no tape", file=run, remedy="make the run with --record")
    with ExitStack() as replayed:
        for part in settings.parts:
            replayed.enter_context(part.replay(run / "tape"))
        tasks = {task.id: task for task in load_data(settings, settings.data)}
    recorded = list(replayable_rollouts(Rollouts(run)))
    different = 0
    player = next((player for part in settings.parts if (player := part.make_player(settings))), None)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(ReplayGateway(run / "tape"))
        if player is not None:
            await stack.enter_async_context(player)
        trust_model(settings, settings.model)
        template = load_template(settings.model, settings.template, gateway.specs)
        for before, attempt in recorded:
            task = tasks.get(before.task)
            if task is None:
                remedy = "replay it beside the data that it was made from"
                raise ConfigError(f"the task {before.task!r} is no longer there", file=settings.data, remedy=remedy)
            engine = RecordedPolicy(before)
            sampling, stepper = make_sampling(settings), make_stepper(settings)
            runner = RolloutRunner(engine, template, gateway, settings.limits, sampling, stepper, seed=settings.seed)
            if player is not None:
                runner = player.wrap(runner)
            async with engine:
                after = await runner.run(task, group=before.group, index=before.index, attempt=attempt)
            if problem := describe_difference(before, after):
                different += 1
                console.print(f"{before.task} {before.group}/{before.index}: {problem}", markup=False, soft_wrap=True)
    console.print(f"{len(recorded)} rollouts replayed, {different} of them differ", markup=False)
    return not different


def replayable_rollouts(rollouts: Iterable[Rollout]) -> Iterator[tuple[Rollout, int]]:
    """The rollouts to replay, each with its number of failed attempts, which stand before their refill."""
    failed: Counter[tuple[str, int]] = Counter()
    for rollout in rollouts:
        if rollout.stop.is_infrastructure:
            failed[rollout.group, rollout.index] += 1
        else:
            yield rollout, failed[rollout.group, rollout.index]


class RecordedPolicy(ScriptedEngine):
    """Answers with what the policy sampled. Each turn is found by the digest of its prompt, since agents and sub-agents
    may ask for theirs in another order."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__({})
        self._turns: dict[bytes, deque[Entry]] = defaultdict(deque)
        for ledger in rollout.ledgers:
            prompt = _PromptDigest()
            for entry in ledger:
                if entry.author is Author.POLICY:
                    self._turns[prompt.value].append(entry)
                prompt.add(entry.ids, Ledger((entry,)).images)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        await anyio.lowlevel.checkpoint()
        prompt = _PromptDigest()
        prompt.add(ids, images)
        turns = self._turns.get(prompt.value)
        if not turns:
            raise EngineError(f"a prompt of {len(ids)} tokens was not sent in the recorded run")
        turn = turns.popleft()
        if on_ids is not None:
            on_ids(turn.ids)
        stop = cast(FinishReason, turn.finish_reason) if turn.finish_reason in get_args(FinishReason) else "stop"
        version, earlier = turn.version or 0, turn.earlier_versions
        return Generation(turn.ids, turn.logprobs or (), stop, version, turn.cached_tokens, earlier)


class _PromptDigest:
    """A digest of a prompt's ids and images that grows with the prompt."""

    def __init__(self) -> None:
        self._ids, self._images = blake2b(digest_size=16), blake2b(digest_size=16)

    def add(self, ids: Sequence[int], images: Sequence[Image]) -> None:
        self._ids.update(array("q", ids).tobytes())
        for image in images:
            self._images.update(image.digest.encode())

    @property
    def value(self) -> bytes:
        return self._ids.digest() + self._images.digest()


def describe_difference(before: Rollout, after: Rollout) -> str:
    """The first difference between a recorded rollout and its replay; empty if there is none."""
    for name, recorded, replayed in (
        ("ids", [ledger.ids for ledger in before.ledgers], [ledger.ids for ledger in after.ledgers]),
        ("masks", [ledger.mask for ledger in before.ledgers], [ledger.mask for ledger in after.ledgers]),
        ("stop", before.stop, after.stop),
        ("rewards", dict(before.rewards), dict(after.rewards)),
    ):
        if recorded != replayed:
            return f"other {name}: {recorded!r:.200} was recorded, {replayed!r:.200} was replayed ({after.reason})"
    return ""
