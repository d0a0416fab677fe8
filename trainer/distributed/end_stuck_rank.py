"""What a rank's watchdog looks at, and how it ends the process: rank 0 says who is late, others what they wait for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread, main_thread

from trainer.distributed.connect_ranks import ProcessGroupRanks
from trainer.distributed.errors import LostRankError, RankError
from trainer.distributed.rank_commands import LeaderChannel
from trainer.distributed.rank_environment import NOT_AGAIN, write_exit_code
from trainer.distributed.rank_failures import (
    STUCK_REMEDY,
    RankFailure,
    describe_late_stage,
    print_failure,
    report_failure,
)
from trainer.distributed.watchdog import Stage, find_place

CAUSE_S = 20.0
"""How long a command may go on after one of its ranks has ended: gloo notices by itself, NCCL does not."""
GRACE_S = 30.0
"""How long the other ranks wait for rank 0's word, and for its end, which is theirs."""
STORE_S = 5.0
"""How long a store that may be lost is asked."""
LOOP_REMEDY = "look for a function of your own that blocks there, or a disk that hangs; continue with --resume"


class LeaderWatch:
    """What rank 0's watchdog looks at."""

    def __init__(self, channel: LeaderChannel, end_others: Callable[[], None]) -> None:
        """`end_others` ends processes that do not end with this one."""
        self._channel, self._ranks, self._end_others = channel, channel.ranks, end_others
        self._watchdog = channel.ranks.watchdog
        self._ended_s: float | None = None
        self.loop_seen_s: float | None = None
        """When the event loop last went round; None while it is not watched."""

    def mark_loop(self) -> None:
        """The event loop goes round."""
        self.loop_seen_s = self._watchdog.now_s

    def look(self) -> Callable[[], None] | None:
        """What ends this process, if something is wrong."""
        if stage := self._watchdog.find_late_stage():
            return partial(self._end, partial(self._explain_late, stage))
        if self._has_lost_rank():
            return partial(self._end, partial(self._channel.find_cause, self._channel.current))
        stuck_s = self._watchdog.now_s - self.loop_seen_s if self.loop_seen_s is not None else 0.0
        if stuck_s > self._ranks.settings.timeout_s:
            return partial(self._end, partial(self._explain_loop, stuck_s))
        return None

    def _has_lost_rank(self) -> bool:
        """Whether a command goes on for some time although a rank has ended or is silent."""
        now_s = self._watchdog.now_s
        if self._watchdog.stage is None or not self._channel.find_ended():
            self._ended_s = None
        elif self._ended_s is None:
            self._ended_s = now_s
        return self._ended_s is not None and now_s - self._ended_s > CAUSE_S

    def _explain_late(self, stage: Stage) -> RankError:
        return self._channel.explain_late(describe_late_stage(0, stage, self._ranks.device))

    def _explain_loop(self, stuck_s: float) -> RankError:
        place = find_place(main_thread().ident or 0)
        problem = f"{self._channel.names[0]}: its event loop has not gone round for {stuck_s:.0f} s, in {place.text}"
        return LostRankError(problem, LOOP_REMEDY)

    def _end(self, explain: Callable[[], RankError | None]) -> None:
        """Says why, and ends all ranks: this process at once, since its threads cannot be interrupted."""
        found: list[RankError | None] = []
        asking = Thread(target=lambda: found.append(explain()), daemon=True)
        asking.start()
        asking.join(GRACE_S)
        unknown = f"the ranks lost each other in {self._channel.current!r}, and none of them says why"
        error = (found and found[0]) or LostRankError(unknown, STUCK_REMEDY)
        sys.stderr.write(f"mtrl-train: {error}\n")
        sys.stderr.flush()
        self._end_others()
        code = getattr(error, "exit_code", NOT_AGAIN)
        write_exit_code(code)
        os._exit(code)


class FollowerWatch:
    """What the watchdog of another rank looks at."""

    def __init__(self, ranks: ProcessGroupRanks, leader: str) -> None:
        """`leader` is the name of rank 0."""
        self._ranks, self._leader = ranks, leader
        self._reported: Stage | None = None

    def look(self) -> Callable[[], None] | None:
        """What ends this process, if something is wrong."""
        watchdog = self._ranks.watchdog
        if silent_s := watchdog.find_silent(self._ranks.settings.timeout_s).get(0):
            return partial(
                self._end, RankFailure(self._leader, f"has shown no sign of life for {silent_s:.0f} s", STUCK_REMEDY)
            )
        stage = watchdog.find_late_stage()
        if stage is None:
            return None
        failure = describe_late_stage(self._ranks.rank, stage, self._ranks.device)
        if stage is not self._reported:
            self._reported = stage
            telling = Thread(
                target=report_failure, args=(self._ranks.side_store, self._ranks.rank, failure), daemon=True
            )
            telling.start()
            telling.join(STORE_S)
        return partial(self._end, failure) if watchdog.now_s - stage.began_s > stage.limit_s + GRACE_S else None

    def _end(self, failure: RankFailure) -> None:
        print_failure(failure)
        os._exit(1)
