"""Tests of files copied out of verl and put beside the configuration: relative imports, Ray, and the search parser."""

from __future__ import annotations

import anyio
import pytest

from gateway.config.load_object import load_object
from gateway.errors import ConfigError
from mtrl_plugins.verl.base import BaseTool
from tests.conftest import Write

TOOL = """
    from verl.utils.reward_score import geo3k
    from verl.utils.rollout_trace import rollout_trace_op

    from .base_tool import BaseTool
    from .schemas import OpenAIFunctionToolSchema, ToolResponse
    from .neighbour import FACTOR

    class MyTool(BaseTool):
        def __init__(self, config, tool_schema=None):
            self.tool_schema = OpenAIFunctionToolSchema.model_validate(
                {"type": "function", "function": {"name": "mine"}})
            super().__init__(config, tool_schema)

        @rollout_trace_op
        async def execute(self, instance_id, parameters, **kwargs):
            from .neighbour import LATER
            score = geo3k.compute_score("3", "3", use_boxed=False, format_score=0.0)
            return ToolResponse(text=str(score)), FACTOR, LATER
"""
POOL = """
    import threading
    import ray
    import ray.actor

    @ray.remote(concurrency_groups={"acquire": 1, "release": 10})
    class Bucket:
        def __init__(self, size):
            self.semaphore = threading.Semaphore(size)
            self.size = size

        @ray.method(concurrency_group="acquire")
        def acquire(self):
            self.semaphore.acquire()

        @ray.method(concurrency_group="release")
        def release(self):
            self.semaphore.release()

        def total(self):
            return self.size

    class Worker:
        def __init__(self, size):
            self.bucket = Bucket.options(name="limiter", get_if_exists=True).remote(size)

        def execute(self, function, *args):
            ray.get(self.bucket.acquire.remote())
            try:
                return function(*args)
            finally:
                self.bucket.release.remote()

        def bucket_size(self):
            return ray.get(self.bucket.total.remote())

    def pool(size):
        return ray.remote(Worker).options(max_concurrency=4).remote(size)
"""


async def test_copied_tool_imports_its_neighbours_and_verls_modules_relatively(write: Write) -> None:
    write("neighbour.py", "FACTOR = 0.5\nLATER = {'calls': 1}")
    file = write("my_tool.py", TOOL)
    tool = load_object("my_tool.MyTool", file.with_name("tools.yaml"), "tools[0]")({})
    assert isinstance(tool, BaseTool) and tool.name == "mine"
    response, reward, metrics = await tool.execute("i", {})
    assert (response.text, reward, metrics) == ("1.0", 0.5, {"calls": 1})


def test_missing_neighbour_is_reported_by_line(write: Write) -> None:
    file = write("my_lonely_tool.py", "from .base_tool import BaseTool\nfrom .nowhere import x")
    with pytest.raises(ConfigError, match=r"No module named '.*nowhere' \(.*my_lonely_tool\.py:2\)"):
        load_object("my_lonely_tool.MyTool", file.with_name("tools.yaml"), "tools[0]")


async def test_pool_of_ray_actors_runs_in_threads(write: Write) -> None:
    file = write("my_pool.py", POOL)
    pool = load_object("my_pool.pool", file)(2)
    with anyio.fail_after(60):
        assert await pool.execute.remote(max, 3, 4) == 4
        with pytest.raises(ZeroDivisionError):
            await pool.execute.remote(divmod, 1, 0)
        assert await load_object("my_pool.pool", file)(9).bucket_size.remote() == 2, "an actor of this name exists"


def test_other_names_of_ray_are_refused_with_those_offered(write: Write) -> None:
    file = write("my_cluster.py", "import ray\nray.init(address='auto')")
    with pytest.raises(ConfigError, match=r"offers no ray\.init in its place; offered: .*remote") as caught:
        load_object("my_cluster.pool", file)
    assert "install ray" in str(caught.value)


async def test_functions_of_ray_are_refused(write: Write) -> None:
    file = write("my_remote_function.py", "import ray\n@ray.remote\ndef work():\n    return 1")
    with pytest.raises(ConfigError, match="only classes can be remote"):
        load_object("my_remote_function.work", file)


def test_subclass_of_verls_mcp_tool_keeps_state_by_instance() -> None:
    assert load_object("verl.tools.mcp_base_tool.MCPBaseTool")({}, None)._instance_dict == {}
