"""Laws: each name offered in place of verl's gives the same results as verl 0.7.0's own, or refuses."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.load_object import load_object
from gateway.mcp_client.decode import to_result
from gateway.mcp_client.parse_hook import apply_parser
from gateway.native.base import OpenAIFunctionToolSchema
from mtrl_plugins.verl import geo3k_rule, gsm8k_rule
from mtrl_plugins.verl.compat_names import OFFERED

VERL = Path(__file__).parents[4] / ".peers" / "verl"
STUBS: dict[str, dict[str, Any]] = {
    "fastmcp": {},
    "fastmcp.exceptions": {"ClientError": type("ClientError", (Exception,), {})},
    "omegaconf": {"OmegaConf": None},
    "qwen_vl_utils": {"fetch_image": None, "fetch_video": None},
    "torch": {"Tensor": object},
    "verl.tools.utils.mcp_clients": {},
    # The wheel lacks this module, which the class only needs for calls.
    "verl.tools.utils.mcp_clients.McpClientManager": {"ClientManager": type("ClientManager", (), {})},
    "verl.utils.ray_utils": {"get_event_loop": None},
}


def load_originals(names: list[str]) -> dict[str, ModuleType]:
    """The modules by name. Packages are not initialized, since that would import all of verl."""
    assert VERL.is_dir(), f"{VERL} is missing: run `make peers`"
    before = dict(sys.modules)
    try:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
        for package in {parent for name in names for parent in _parents(name)} | {"verl.utils", "verl.tools.utils"}:
            sys.modules[package] = _module(package)
            sys.modules[package].__path__ = [str(VERL.joinpath(*package.split(".")[1:]))]
        for name, values in STUBS.items():
            sys.modules[name] = _module(name, **values)
        return {name: import_module(name) for name in names}
    finally:
        for name in {*sys.modules} - {*before}:
            del sys.modules[name]
        sys.modules.update(before)


def _parents(name: str) -> list[str]:
    steps = name.split(".")
    return [".".join(steps[:length]) for length in range(1, len(steps))]


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


COMPARED = {
    "verl.interactions.base": {"BaseInteraction"},
    "verl.tools.base_tool": {"BaseTool"},
    "verl.tools.schemas": {*OFFERED["verl.tools.schemas"]},
    "verl.tools.gsm8k_tool": {"Gsm8kTool"},
    "verl.tools.mcp_base_tool": {"MCPBaseTool"},
    "verl.tools.mcp_search_tool": {"MCPSearchTool"},
    "verl.tools.utils.tool_registry": {"ToolType"},
    "verl.utils.dataset.vision_utils": {"process_image"},
    "verl.utils.reward_score": {"default_compute_score"},
    "verl.utils.reward_score.gsm8k": {"compute_score", "extract_solution"},
    "verl.utils.reward_score.geo3k": {"compute_score", "acc_reward", "format_reward"},
    "verl.utils.rollout_trace": {"rollout_trace_op", "rollout_trace_attr"},
}
"""What a law below compares."""
OTHERWISE = {
    "verl.tools.base_tool": "its further names are those of verl.tools.schemas and verl.tools.utils.tool_registry",
    "verl.tools.utils.tool_registry": "reads files: tests/config/test_verl_files.py and test_verl_classes.py",
    "verl.interactions.utils.interaction_registry": "reads files: test_verl_classes.py",
    "verl.interactions.gsm8k_interaction": "verl's own tests of it pass: test_verl_imports.py",
    "verl.utils.dataset.vision_utils": "process_video returns a list of frames, no tensor: tests/media",
}
"""Names that cannot be compared by values, with what tests them."""
NAMES = [*COMPARED]
ORIGINALS = load_originals([name for name in NAMES if name != "verl.utils.reward_score"])

TEXTS = st.lists(
    st.sampled_from(["#### ", "42", "-5", "1,000", ".", "$", " ", "\n", "it is ", "'", "4" * 400]), max_size=8
).map("".join)
TRUTHS = st.sampled_from(["42", "-5", "1000", "", None])
ANSWERS = st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2))
PIECES = st.sampled_from(
    ['{"query": "a b"', ", 'results': [", '"title": "t"', "]", "}", '"results": [[1], 2]', "'query': ''", "\n", "it's"]
)
SEARCHES = st.lists(PIECES | st.text(max_size=5), max_size=8).map("".join)
CONTENT = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, SEARCHES)
    | st.just({"type": "image", "data": "aGk=", "mimeType": "image/png"})
    | st.just({"type": "resource", "resource": {"uri": "file:///x", "text": "r"}}),
    max_size=4,
)
SCHEMA = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}}}  # fmt: skip


def _ours(module: str, name: str) -> Any:
    target, _, attribute = OFFERED[module][name].partition(":")
    return getattr(import_module(target), attribute)


def _both(module: str, name: str) -> tuple[Any, Any]:
    return _ours(module, name), getattr(ORIGINALS[module], name)


def _schemas() -> tuple[Any, Any]:
    kinds = (OpenAIFunctionToolSchema, ORIGINALS["verl.tools.schemas"].OpenAIFunctionToolSchema)
    return kinds[0].model_validate(SCHEMA), kinds[1].model_validate(SCHEMA)


def test_each_offered_name_is_compared_or_says_what_tests_it() -> None:
    for module, names in OFFERED.items():
        if {*names} - COMPARED.get(module, set()):
            assert module in OTHERWISE, f"{module}: compare {', '.join({*names} - COMPARED.get(module, set()))}"


@pytest.mark.parametrize("name", ["mcp_base_tool.MCPBaseTool", "mcp_search_tool.MCPSearchTool"])
@settings(max_examples=20)
@given(content=CONTENT)
def test_answers_of_mcp_servers_are_parsed_as_by_verls_classes(name: str, content: list[dict[str, Any]]) -> None:
    module, kind = f"verl.tools.{name.partition('.')[0]}", name.partition(".")[2]
    ours, theirs = _both(module, kind)
    schemas = _schemas()
    parsed = apply_parser(ours({}, schemas[0]), content, to_result({"content": content}))
    objects = [SimpleNamespace(**item) for item in content]
    tool = theirs({}, schemas[1])

    async def call_tool(*args: Any) -> Any:
        return SimpleNamespace(content=objects)

    ORIGINALS["verl.tools.mcp_base_tool"].ClientManager.call_tool = staticmethod(call_tool)

    async def execute() -> Any:
        instance_id, _ = await tool.create()
        return await tool.execute(instance_id, {})

    response, _, metrics = anyio.run(execute)
    assert parsed.text == response.text
    assert [type(part).__name__ for part in parsed.parts] == ["Text"]
    assert {key: parsed.metrics[key] for key in metrics} == metrics
    assert "parse_failed" not in parsed.metrics


@pytest.mark.parametrize("name", ["mcp_base_tool.MCPBaseTool", "mcp_search_tool.MCPSearchTool"])
def test_error_of_a_server_reaches_the_policy_unparsed(name: str) -> None:
    content = [{"type": "text", "text": "no such page"}]
    result = to_result({"content": content, "isError": True})
    kind = load_object(f"verl.tools.{name}")
    assert apply_parser(kind({}, None), content, result) == result


@given(answers=st.lists(ANSWERS, max_size=3), truth=TRUTHS, nested=st.booleans())
def test_gsm8k_tool_equals_verls(answers: list[Any], truth: Any, nested: bool) -> None:
    ours, theirs = _both("verl.tools.gsm8k_tool", "Gsm8kTool")
    row = {"create_kwargs": {"ground_truth": truth}} if nested else {"ground_truth": truth}

    async def play(tool: Any) -> list[Any]:
        created, greeting = await tool.create("", **row)
        seen: list[Any] = [created, greeting.is_empty()]
        for answer in answers:
            response, reward, metrics = await tool.execute(created, {"answer": answer})
            seen.append((response.text, reward, metrics, await tool.calc_reward(created)))
        seen.append(dict(tool._instance_dict))
        await tool.release(created)
        return [*seen, tool._instance_dict]

    schemas = _schemas()
    mine, verls = anyio.run(play, ours({}, schemas[0])), anyio.run(play, theirs({}, schemas[1]))
    assert repr(mine) == repr(verls)


@pytest.mark.parametrize("instance_id", [None, "", "x"])
def test_base_classes_equal_verls(instance_id: str | None) -> None:
    async def play_tool(tool: Any) -> list[Any]:
        created, response = await tool.create(instance_id)
        answer, reward, metrics = await tool.execute(created, {})
        seen = [created if instance_id is not None else len(created), response.is_empty(), answer.text, reward, metrics]
        return [*seen, await tool.calc_reward(created), await tool.release(created), tool.name, tool.config]

    schemas = _schemas()
    tools = _both("verl.tools.base_tool", "BaseTool")
    mine, verls = (anyio.run(play_tool, kind({"a": 1}, schema)) for kind, schema in zip(tools, schemas, strict=True))
    assert mine == verls

    async def play_interaction(interaction: Any) -> list[Any]:
        started = await interaction.start_interaction(instance_id, a=1)
        seen = [started if instance_id is not None else len(started), interaction.name, interaction.config]
        seen += [await interaction.generate_response(started, []), await interaction.calculate_score()]
        return [*seen, await interaction.finalize_interaction()]

    mine, verls = (anyio.run(play_interaction, kind({})) for kind in _both("verl.interactions.base", "BaseInteraction"))
    assert mine == verls


PROPERTIES = st.dictionaries(
    st.text(max_size=4),
    st.fixed_dictionaries(
        {"type": st.text(max_size=5)},
        optional={"description": st.text(max_size=4), "enum": st.lists(st.text(), max_size=2)},
    ),
    max_size=3,
)


@given(PROPERTIES, st.lists(st.text(max_size=3), max_size=2), st.text(), st.text(), st.text(), st.text())
def test_schemas_dump_as_verls(
    properties: Any, required: list[str], name: str, description: str, arguments: str, call_id: str
) -> None:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters, "strict": True}
    call = {"name": name, "arguments": {"a": [1, None]}}
    values: dict[str, Any] = {
        "OpenAIFunctionParametersSchema": parameters,
        "OpenAIFunctionSchema": function,
        "OpenAIFunctionToolSchema": {"type": "function", "function": function},
        "OpenAIFunctionParsedSchema": {"name": name, "arguments": arguments},
        "OpenAIFunctionCallSchema": call,
        "OpenAIFunctionToolCall": {"id": call_id, "function": call},
    }
    for kind, value in values.items():
        ours, theirs = (model.model_validate(value) for model in _both("verl.tools.schemas", kind))
        options: dict[str, Any] = {"exclude_unset": True, "exclude_none": True}
        assert ours.model_dump(**options) == theirs.model_dump(**options)


@given(st.one_of(st.text(), st.from_type(dict).map(str), st.builds(json.dumps, st.dictionaries(st.text(), st.none()))))
def test_calls_are_parsed_as_by_verl(arguments: str) -> None:
    names = ("OpenAIFunctionParsedSchema", "OpenAIFunctionCallSchema")
    kinds = zip(*(_both("verl.tools.schemas", name) for name in names), strict=True)
    answers = [call.from_openai_function_parsed_schema(parsed(name="f", arguments=arguments)) for parsed, call in kinds]
    assert answers[0][0].model_dump() == answers[1][0].model_dump()
    assert answers[0][1] is answers[1][1]


LISTS = st.none() | st.lists(st.integers(), max_size=2)


@given(text=st.none() | st.text(max_size=3), image=LISTS, video=LISTS)
def test_tool_responses_equal_verls(text: str | None, image: Any, video: Any) -> None:
    values = {"text": text, "image": image, "video": video}
    given_values = {key: value for key, value in values.items() if value is not None}
    ours, theirs = (kind(**given_values) for kind in _both("verl.tools.schemas", "ToolResponse"))
    assert ours.model_dump() == theirs.model_dump()
    assert bool(ours.is_empty()) == bool(theirs.is_empty())
    assert bool(ours.is_text_only()) == bool(theirs.is_text_only())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "CMYK", "1"])
def test_pil_images_are_converted_as_by_verl(mode: str) -> None:
    image = PIL.Image.linear_gradient("L").resize((8, 8)).convert("RGBA")
    image.putalpha(PIL.Image.radial_gradient("L").resize((8, 8)))
    image = image.convert(mode)
    ours, theirs = (convert(image) for convert in _both("verl.utils.dataset.vision_utils", "process_image"))
    assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())


def test_tool_types_equal_verls() -> None:
    ours, theirs = _both("verl.tools.utils.tool_registry", "ToolType")
    assert {item.name: item.value for item in ours} == {item.name: item.value for item in theirs}


@given(text=TEXTS, truth=st.sampled_from(["42", "-5", "1000", ""]))
def test_default_score_equals_the_rules_of_verl(text: str, truth: str) -> None:
    score = _ours("verl.utils.reward_score", "default_compute_score")
    rules = {"openai/gsm8k": "gsm8k", "hiyouga/geometry3k": "geo3k"}
    for source, rule in rules.items():
        original = ORIGINALS[f"verl.utils.reward_score.{rule}"].compute_score(text, truth)
        assert score(source, text, truth) == float(original)


@pytest.mark.parametrize("source", ["math_dapo", "lighteval/MATH", "codecontests", "searchR1_nq", "anything"])
def test_data_source_without_a_rule_is_refused_by_name(source: str) -> None:
    with pytest.raises(NotImplementedError, match=f"no reward function for data_source='{source}'"):
        _ours("verl.utils.reward_score", "default_compute_score")(source, "1", "1")


def test_traced_functions_return_what_they_do_without_tracing() -> None:
    def apply(decorator: Any, attributes: Any) -> list[Any]:
        class Traced:
            @decorator
            async def later(self, a: int) -> int:
                return a + 1

            @decorator
            def now(self, a: int) -> int:
                return a + 2

        with attributes(sample_index=1, step=2, rollout_n=3, name="n", validate=True, trace=False) as value:
            return [value, anyio.run(Traced().later, 1), Traced().now(1), Traced.now.__name__]

    ops, attributes = (_both("verl.utils.rollout_trace", name) for name in ("rollout_trace_op", "rollout_trace_attr"))
    assert apply(ops[0], attributes[0]) == apply(ops[1], attributes[1])


NUMBERS = ["#### ", "####", "42", "-5", "1,000", "3.50", ".", ",", "$", "%", " ", "\n", "-", "so it goes " * 30]
ANSWER = st.sampled_from(["42", "-5", "1000", "3.50", ".", "42.", ""])
BOXES = ["<think>", "</think>", r"\boxed{", "}", "3", r"\frac{1}{2}", "0.5", "3^\\circ", r"\sqrt{2}", " ", "\n", "x = "]


GSM8K, GEO3K = (ORIGINALS[f"verl.utils.reward_score.{name}"] for name in ("gsm8k", "geo3k"))


@given(text=st.lists(st.sampled_from(NUMBERS), max_size=14).map("".join), truth=ANSWER)
def test_gsm8k_rule_equals_verls_for_any_text(text: str, truth: str) -> None:
    for method in ("strict", "flexible"):
        ours = gsm8k_rule.compute_score(text, truth, method, format_score=0.1)
        assert ours == GSM8K.compute_score(text, truth, method, format_score=0.1)
        assert gsm8k_rule.extract_solution(text, method) == GSM8K.extract_solution(text, method)


@given(text=st.lists(st.sampled_from(BOXES), max_size=10).map("".join), truth=st.sampled_from(["3", "0.5", "2", ""]))
def test_geometry3k_rule_equals_verls_for_any_text(text: str, truth: str) -> None:
    for use_boxed in (True, False):
        assert geo3k_rule.compute_score(text, truth, use_boxed) == GEO3K.compute_score(text, truth, use_boxed)


def test_gsm8k_refuses_a_number_as_ground_truth() -> None:
    with pytest.raises(TypeError, match=r"ground_truth is the number 42; the rule compares texts: write '42'"):
        gsm8k_rule.compute_score("#### 42", 42)
