"""A taskset of verifiers' v1: a tool server with state, rewards with weights, a metric, and a stop."""

from collections.abc import Iterable

import verifiers.v1 as vf

PRICES = {"apple": 2, "pear": 3}


class FruitData(vf.TaskData):
    answer: str


class ShopState(vf.State):
    looked_up: list[str] = []


class ShopConfig(vf.ToolsetConfig):
    pass


class Shop(vf.Toolset[ShopConfig, ShopState]):
    @vf.tool
    async def price(self, item: str) -> str:
        """Looks up what one piece of an item costs."""
        self.state.looked_up = [*self.state.looked_up, item]
        return str(PRICES[item])


class FruitTask(vf.Task[FruitData, ShopState]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(ShopConfig())]

    @vf.stop
    async def asked_enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward(weight=2.0)
    async def correct(self, trace) -> float:
        return float((trace.last_reply or "").strip(" .").endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def looked_up(self, trace) -> float:
        return float(len(trace.state.looked_up))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class FruitConfig(vf.TasksetConfig):
    count: int = 2


class FruitTaskset(vf.Taskset[FruitTask, FruitConfig]):
    def load(self) -> Iterable[FruitTask]:
        for count in range(1, self.config.count + 1):
            data = FruitData(
                prompt=f"What do {count} apples cost?", answer=str(2 * count), system_prompt="You sell fruit."
            )
            yield FruitTask(data, self.config.task)


__all__ = ["FruitTaskset"]

if __name__ == "__main__":
    Shop.run()
