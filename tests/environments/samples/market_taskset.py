"""A taskset of verifiers' v1 whose tool server all rollouts share: prices, two rewards with weights, and a metric."""

from collections.abc import Iterable

import verifiers.v1 as vf

PRICES = {"apple": 2, "pear": 3, "fig": 5}


class MarketData(vf.TaskData):
    item: str
    answer: str


class Market(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def price(self, item: str, count: int = 1) -> str:
        """Looks up what pieces of an item cost."""
        return str(PRICES[item] * count)


class MarketTask(vf.Task[MarketData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        return float((trace.last_reply or "").strip(" .").endswith(self.data.answer))

    @vf.reward(weight=0.3)
    async def brief(self, trace) -> float:
        return 1.0 / trace.num_turns

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class MarketConfig(vf.TasksetConfig):
    count: int = 8


class MarketTaskset(vf.Taskset[MarketTask, MarketConfig]):
    def load(self) -> Iterable[MarketTask]:
        for number in range(self.config.count):
            item = [*PRICES][number % len(PRICES)]
            answer = str(PRICES[item] * (number + 1))
            prompt = f"What do {number + 1} pieces of {item} cost?"
            yield MarketTask(MarketData(prompt=prompt, item=item, answer=answer), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Market(vf.SharedToolsetConfig())]


__all__ = ["MarketTaskset"]

if __name__ == "__main__":
    Market.run()
