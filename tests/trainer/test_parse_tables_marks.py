"""Tool-call parsers of families with markers: valid, invalid and hostile turns."""

from __future__ import annotations

import pytest

from trainer.parse.choose import load_parser


def _mark(words: str) -> str:
    return "<\uff5ctool\u2581" + words.replace(" ", "\u2581") + "\uff5c>"


SECTION, SECTION_END = _mark("calls begin"), _mark("calls end")
CALL, CALL_END, SEP = _mark("call begin"), _mark("call end"), _mark("sep")
K_SECTION, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_CALL, K_ARGS, K_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
COMMENTARY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"

GOOD = [
    ("llama3", '\n {"type": "function", "name": "add", "parameters": {}} ', [("add", "{}")], ""),
    ("llama3", '{"name": "a", "parameters": {}} ; {"name": "b", "parameters": {}}', [("a", "{}"), ("b", "{}")], ""),
    ("llama3", '<|python_tag|>{"name": "a", "parameters": {}}; ', [("a", "{}")], "; "),
    ("llama3", 'Wait. <|python_tag|>{"name": "now"}', [("now", "{}")], "Wait."),
    ("llama3", '{"answer": {"name": "add", "parameters": {}}}', [], '{"answer": {"name": "add", "parameters": {}}}'),
    ("llama3", 'See {"name": "add", "parameters": {}}', [], 'See {"name": "add", "parameters": {}}'),
    (
        "mistral",
        'Hm.[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "abcdefghi"}, {"name": "b", "arguments": {}}]',
        [("a", "{}"), ("b", "{}")],
        "Hm.",
    ),
    (
        "mistral",
        '[TOOL_CALLS]a[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]b[ARGS]{}',
        [("a", '{"x": "[TOOL_CALLS]"}'), ("b", "{}")],
        "",
    ),
    ("mistral", "[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS] {}", [("a", "{}")], ""),
    (
        "deepseek",
        f'Hm.{SECTION}{CALL}a{SEP}{{"x": "{CALL_END}"}}{CALL_END}{CALL}b{SEP}{{}}{CALL_END}{SECTION_END}',
        [("a", f'{{"x": "{CALL_END}"}}'), ("b", "{}")],
        "Hm.",
    ),
    (
        "deepseek",
        f"{SECTION}{CALL}function{SEP}a\n```json\n{{}}\n```{CALL_END}\n{CALL}function{SEP}b\n```json\n{{}}\n```{CALL_END}",
        [("a", "{}"), ("b", "{}")],
        "",
    ),
    (
        "kimi",
        f"Hm.{K_SECTION}{K_CALL}functions.a:0 {K_ARGS}{{}}{K_CALL_END}"
        f"{K_CALL}functions.b.c:1{K_ARGS}{{}}{K_CALL_END}{K_END}",
        [("a", "{}"), ("b.c", "{}")],
        "Hm.",
    ),
    ("harmony", f'{COMMENTARY}{{"a": "<|call|>"}}', [("add", '{"a": "<|call|>"}')], ""),
    ("harmony", " to=functions.add<|channel|>commentary json<|message|>{}<|call|>", [("add", "{}")], ""),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.add<|channel|>commentary"
        "<|message|> {} <|call|>",
        [("add", "{}")],
        "I look.",
    ),
    (
        "harmony",
        f"{COMMENTARY}{{}}<|call|><|start|>assistant{COMMENTARY}{{}}<|call|>",
        [("add", "{}"), ("add", "{}")],
        "",
    ),
    ("harmony", "<|channel|>final<|message|> It is 4. <|return|>", [], " It is 4. "),
    ("harmony", "No marks\n", [], "No marks\n"),
    ("harmony", "Hi <|channel|>final<|message|>there", [], "Hi\nthere"),
    (
        "harmony",
        "I write to=functions.rm <|channel|>commentary<|message|>{}<|call|>",
        [],
        "I write to=functions.rm\n{}",
    ),
]


BAD = [
    ("llama3", '{"name": "add", "parameters": {"a": 1}', "its JSON ends too early"),
    ("llama3", '{"name": "add", "arguments": {}}', 'it has no "parameters"'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', "a JSON object is missing"),
    ("mistral", "[TOOL_CALLS]", "[ARGS] is missing"),
    ("mistral", '[TOOL_CALLS][{"arguments": {}}, 5]', 'it has no "name"'),
    ("mistral", "[TOOL_CALLS]a[ARGS]nothing", "a JSON object is missing"),
    ("deepseek", f"{SECTION}no call{SECTION_END}", f"{CALL} is missing"),
    ("deepseek", f"{CALL}a", f"{SEP} is missing"),
    ("deepseek", f"{CALL}function{SEP}a\n{{}}{CALL_END}", "```json is missing"),
    ("deepseek", f"{CALL}a{SEP}{{}}", f"{CALL_END} is missing"),
    ("deepseek", f"{CALL}function{SEP}a\n```json\n{{}}\n", "``` is missing"),
    ("kimi", f"{K_SECTION}{K_END}", f"{K_CALL} is missing"),
    ("kimi", f"{K_CALL}add{K_ARGS}{{}}{K_CALL_END}", "its id is not functions.NAME:NUMBER"),
    ("kimi", f"{K_CALL}functions.add:0{K_CALL_END}", f"{K_ARGS} is missing"),
    ("kimi", f"{K_CALL}functions.add:0{K_ARGS}{{}}", f"{K_CALL_END} is missing"),
    ("harmony", f"{COMMENTARY}{{}} and more<|call|>", "<|call|> is missing"),
    ("harmony", "<|channel|>commentary to=functions.add", "<|message|> is missing"),
    ("harmony", "<|channel|>commentary to=python<|message|>print(1)<|call|>", "to=functions.NAME, on the commentary"),
    ("harmony", "<|channel|>final to=functions.add<|message|>{}<|call|>", "to=functions.NAME, on the commentary"),
    ("harmony", "<|start|>user<|message|>Call add!<|end|>", "the header of a message cannot be read"),
    # Hostile ones.
    ("mistral", "[TOOL_CALLS]<think>[TOOL_CALLS]a[ARGS]{}", "needs the name of a tool"),
    ("deepseek", f"{CALL}<think>{CALL}a{SEP}{{}}{CALL_END}", "needs the name of a tool"),
    ("kimi", f"{K_CALL}functions.a:{'9' * 9000}{K_ARGS}{{}}{K_CALL_END}", "its id is not"),
    ("kimi", f"{K_CALL}functions.a:\u0661{K_ARGS}{{}}{K_CALL_END}", "its id is not"),
    ("harmony", "<|channel|>analysis to=functions.add<|message|>{}<|call|>", "on the commentary channel"),
    ("harmony", "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>", "header of a message"),
]


def test_call_id_is_kept_if_the_family_writes_one() -> None:
    (call,) = load_parser("kimi").parse(f"{K_CALL}functions.add:3{K_ARGS}{{}}{K_CALL_END}").calls
    assert call.id == "functions.add:3"
    first, second, third = (
        load_parser("mistral")
        .parse('[TOOL_CALLS][{"name": "a", "id": "abcdefghi"}, {"name": "a", "id": "</s></s>x"}, {"name": "a"}]')
        .calls
    )
    assert first.id == "abcdefghi"
    assert all(len(call.id) == 9 and call.id.isalnum() for call in (second, third))
    assert second.id != third.id
    (call,) = load_parser("mistral").parse("[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{}").calls
    assert call.id == "abcdefghi"


@pytest.mark.parametrize("bad", ["[TOOL_CALLS][" + ", ".join(["5"] * 20) + "]", "[TOOL_CALLS][]" * 20])
def test_text_after_too_many_malformed_calls_is_content(bad: str) -> None:
    reply = load_parser("mistral").parse(f"{bad}[TOOL_CALLS]a[ARGS]{{}} <think>so</think> end")
    assert (len(reply.problems), reply.calls, reply.reasoning) == (8, (), "so")
    assert reply.content.endswith("[TOOL_CALLS]a[ARGS]{}\nend")
