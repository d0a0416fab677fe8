"""A taskset of verifiers' v1 whose user speaks three times: the task has no prompt, and each turn a question."""

from collections.abc import Iterable

import verifiers.v1 as vf


class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def fives(self, trace) -> float:
        return sum(message.content == "5" for message in trace.assistant_messages) / 3


class TalkEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for question in ("What is 2 + 3?", "And 1 + 4?", "And 0 + 5?"):
                if (await interaction.turn(question)).terminated:
                    break


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self) -> Iterable[TalkTask]:
        for number in range(2):
            yield TalkTask(vf.TaskData(idx=number, prompt=None), self.config.task)


__all__ = ["TalkEnv", "TalkTaskset"]
