"""Tools and reward functions as they are written for TRL: values, errors, deadlines, None, async and logging."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from gateway.errors import ConfigError
from mtrl_plugins.trl.caller_thread import CallerThread
from tests.plugins.trl.scripted_grpo import Recorder, Safe, make_trainer, price, script_policy
from tests.trainer.policy_scripts import render_calls
from trainer.train.train_loop import NothingScoredError

ROWS = [{"prompt": [{"role": "user", "content": "Go."}], "total": 6}] * 2

pytestmark = pytest.mark.usefixtures("place")
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def first_completion(model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The messages after the prompt of a rollout that makes one call."""

    def run(tool: Callable[..., Any], arguments: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
        script_policy(monkeypatch, [[render_calls((tool.__name__, arguments)), "done"]])
        recorder = Recorder()
        make_trainer(model, ROWS, recorder, tools=[tool], **kwargs).train()
        completion: list[dict[str, Any]] = recorder.calls[0]["completions"][0]
        return completion

    return run


def test_a_tool_uses_a_resource_of_the_thread_that_made_it(first_completion: Run) -> None:
    import sqlite3

    database = sqlite3.connect(":memory:")
    database.execute("create table prices as select 'pear' as item, 3 as price")

    def find(item: str) -> dict[str, int]:
        """Finds the price.

        Args:
            item: the name
        """
        return dict(database.execute("select item, price from prices where item = ?", (item,)))

    assert first_completion(find, {"item": "pear"})[1]["content"] == "{'pear': 3}", "as Python writes it"
    database.close()


def test_with_tool_threads_synchronous_tools_run_at_the_same_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4, timeout=20)

    def meet() -> str:
        """Waits for the others."""
        together.wait()
        return "met"

    script_policy(monkeypatch, [[render_calls(("meet", {})), "done"]])
    recorder = Recorder()
    make_trainer(model, ROWS, recorder, tools=[meet], tool_threads=True).train()
    assert all(completion[1]["content"] == "met" for completion in recorder.calls[0]["completions"])


def test_images_that_a_tool_returns_are_shown_to_the_functions_as_images(first_completion: Run) -> None:
    from PIL import Image

    def draw(size: int) -> list[dict[str, Any]]:
        """Draws.

        Args:
            size: in pixels
        """
        return [{"type": "image", "image": Image.new("RGB", (size, size))}, {"type": "text", "text": "a square"}]

    content = first_completion(draw, {"size": 28})[1]["content"]
    assert "a square" in str(content)


def test_none_adds_nothing_and_where_all_functions_abstain_the_rollout_is_left_out(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(prompts: list[Any], **kwargs: Any) -> list[float | None]:
        return [None, None, 1.0, 2.0]

    async def others(completions: list[Any], total: list[int], **kwargs: Any) -> list[float | None]:
        await anyio.lowlevel.checkpoint()
        return [None, 3.0, float("nan"), float(total[0])]

    script_policy(monkeypatch, [["done"]])
    args = {"reward_weights": [1.0, 0.5]}
    metrics = make_trainer(model, ROWS, [some, others], args=args).train().metrics
    assert metrics["rollout/count"] == 3 and metrics["reward/failed"] == 1
    assert metrics["reward/some"] == pytest.approx(1.0) and metrics["reward/others"] == pytest.approx(3.0)
    assert metrics["reward/mean"] == pytest.approx((1.5 + 1.0 + 5.0) / 3)


def test_what_functions_log_is_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[tuple[int, float]] = []

    def logs(prompts: list[Any], log_extra: Any, log_metric: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        states.append((trainer_state.global_step, trainer_state.epoch))
        log_extra("number", list(range(len(prompts))))
        log_metric("speed", 2.0)
        log_metric("speed", 4.0)
        return [1.0] * len(prompts)

    script_policy(monkeypatch, [["done"]])
    output = make_trainer(model, ROWS, logs, args={"max_steps": 2}).train()
    assert output.metrics["logged/speed"] == 3.0
    assert states == [(0, 0.0), (1, 0.5)]
    lines = [json.loads(line) for line in (output.folder / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(line["infos"]["number"] for line in lines) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda **kwargs: [1.0], "returned 1 rewards for 4 completions"),
        (lambda **kwargs: threading.Event().wait(600), "no answer within 0.2 s"),
    ],
)
def test_a_function_that_fails_ends_the_run_with_its_name_and_reason(
    function: Callable[..., Any], problem: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_policy(monkeypatch, [["done"]])
    trainer = make_trainer(model, ROWS, function, args={"max_steps": 5}, timeout_s=0.2)
    with pytest.raises(NothingScoredError, match=problem) as raised:
        trainer.train()
    assert "component 'lambda'" in str(raised.value)


def test_functions_of_one_name_are_numbered_and_names_that_metrics_have_are_changed(model: Path) -> None:
    def mean(**kwargs: Any) -> list[float]:
        return []

    trainer = make_trainer(model, ROWS, [mean, mean, lambda **kwargs: []])
    assert list(trainer._parts.rewards) == ["mean_reward", "mean_reward_2", "lambda"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"reward_funcs": "org/reward-model"}, r"reward_funcs\[0\]: 'org/reward-model' is a reward model"),
        ({"reward_funcs": None}, "reward_funcs: is missing"),
        ({"args": {"reward_weights": [1.0, 2.0]}}, "2 weights for 1 reward functions"),
        ({"tools": [3]}, r"tools\[0\]: is a int"),
        ({"callbacks": [1]}, "log_history"),
        ({"optimizers": (1, None)}, "AdamW"),
        ({"rollout_func": print}, "write a stepper"),
        ({"quantization_config": {"a": 1}}, "no quantised training"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_do(given: dict[str, Any], problem: str, model: Path) -> None:
    kwargs = {"rewards": given.pop("reward_funcs", Recorder())} | given
    with pytest.raises(ConfigError, match=problem):
        make_trainer(model, ROWS, **kwargs)


def run_with_caller(main: Callable[[CallerThread], Any]) -> Any:
    """What `main` returns, run by a caller's thread that it gets."""
    caller = CallerThread()
    return caller.run(partial(main, caller))


def test_functions_run_one_after_the_other_and_the_queue_does_not_count() -> None:
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.02)
        running -= 1

    async def main(caller: CallerThread) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(to_thread.run_sync, caller.call, work, 0.3)

    run_with_caller(main)
    assert most == 1


def test_a_function_may_call_back_from_the_same_thread() -> None:
    async def main(caller: CallerThread) -> int:
        return int(await to_thread.run_sync(caller.call, lambda: caller.call(int, 1.0, "3"), 30.0))

    assert run_with_caller(main) == 3


def test_ctrl_c_stops_training_and_is_passed_on() -> None:
    ended = threading.Event()

    async def main(caller: CallerThread) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep(20)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_with_caller(main)
    assert not ended.is_set()


SAFES = [{"prompt": [{"role": "user", "content": "Open it."}], "code": 7}] * 2
DIAL = render_calls(("dial", {"number": 7}))


def answers(completion: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in completion if message["role"] == "tool"]


def test_an_environment_that_owns_rewards_and_tasks_needs_neither_functions_nor_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = script_policy(monkeypatch, [[DIAL, DIAL, "Open."], ["No."], ["No."], ["No."]])
    output = make_trainer(model, None, None, environment_factory=Safe).train()
    assert output.metrics["reward/mean"] == output.metrics["reward/Safe"] == 0.5
    assert len(engines[0].requests) == 6
    with pytest.raises(ConfigError, match="train_dataset: is missing"):
        make_trainer(model, None, Recorder())
    with pytest.raises(ConfigError, match="set max_steps"):
        make_trainer(model, None, None, environment_factory=Safe, args={"max_steps": -1})


def test_environments_are_used_again_after_their_rollouts_were_scored(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_policy(monkeypatch, [[DIAL, "Open."]])
    Safe.made = 0
    recorder = Recorder()
    make_trainer(model, SAFES, recorder, environment_factory=Safe, args={"max_steps": 3}).train()
    assert Safe.made == 4
    environments = [each for call in recorder.calls for each in call["environments"]]
    assert len(environments) == 12 and all(len(each.rows) == 3 for each in environments)


def test_a_column_chooses_among_environments_and_only_its_tools_are_offered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Door:
        def reset(self, **row: Any) -> None:
            assert "environment" not in row
            self.knocks = 0

        async def knock(self, times: int) -> str:
            """Knocks."""
            self.knocks += times
            return f"{self.knocks} knocks"

        async def get_reward(self) -> float:
            return float(self.knocks)

    knock, dial = render_calls(("knock", {"times": 2}), ("knock", {"times": 1})), DIAL
    script_policy(monkeypatch, [[knock, "done"], [dial, "done"], [render_calls(("price", {"item": "pear"})), "done"]])
    recorder = Recorder()
    prompt = [{"role": "user", "content": "Go in."}]
    rows = [{"prompt": prompt, "environment": "door"}, {"prompt": prompt, "environment": "safe"}]
    factories = {"door": Door, "safe": Safe}
    args = {"per_device_train_batch_size": 6, "num_generations": 3}
    trainer = make_trainer(model, rows, recorder, environment_factory=factories, tools=[price], args=args)
    trainer.train()
    by_name = {call["environment"][0]: call for call in recorder.calls}
    knocked, dialled, priced = by_name["door"]["completions"]
    assert answers(knocked) == ["2 knocks", "3 knocks"] and answers(priced) == ["3"]
    assert "no tool named 'dial'" in answers(dialled)[0]
    assert answers(by_name["safe"]["completions"][1]) == ["click"]
    assert [type(each).__name__ for each in by_name["door"]["environments"]] == ["Door"] * 3
    with pytest.raises(ConfigError, match=r"train_dataset\[0\]: environment: is missing"):
        make_trainer(model, SAFES, recorder, environment_factory=factories)
    with pytest.raises(ConfigError, match="'gate' is no environment"):
        make_trainer(model, [rows[0] | {"environment": "gate"}], recorder, environment_factory=factories)


def test_methods_run_where_reset_runs_in_the_thread_that_trains(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Place:
        def __init__(self) -> None:
            threads.append(threading.current_thread())

        def reset(self, **row: Any) -> None:
            threads.append(threading.current_thread())

        def look(self) -> str:
            """Looks."""
            threads.append(threading.current_thread())
            return "a wall"

        def get_reward(self) -> float:
            threads.append(threading.current_thread())
            return 1.0

    script_policy(monkeypatch, [[render_calls(("look", {})), "done"]])
    make_trainer(model, SAFES, None, environment_factory=Place).train()
    assert {*threads} == {threading.main_thread()} and len(threads) == 16


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (lambda: object(), "has no method `reset`"),
        ({"a": 3}, "pass a class or a function"),
        (type("Odd", (), {"reset": lambda self: None, "look": lambda self, *args: ""}), "cannot be a tool"),
    ],
)
def test_what_is_no_environment_is_refused(factory: Any, problem: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_trainer(model, SAFES, Recorder(), environment_factory=factory)


def test_a_stepper_cannot_stand_beside_environments(model: Path) -> None:
    trainer = make_trainer(model, SAFES, None, environment_factory=Safe, settings={"stepper": "x:y"})
    with pytest.raises(ConfigError, match="cannot be combined with environments"):
        trainer.train()
