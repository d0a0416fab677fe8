"""Tables of tool-call parsers: valid, invalid and hostile turns of all families."""

from __future__ import annotations

import json

import pytest

from trainer.parse.choose import choose_parser, load_parser


def _mark(words: str) -> str:
    return "<\uff5ctool\u2581" + words.replace(" ", "\u2581") + "\uff5c>"


SECTION, SECTION_END = _mark("calls begin"), _mark("calls end")
CALL, CALL_END, SEP = _mark("call begin"), _mark("call end"), _mark("sep")
K_SECTION, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_CALL, K_ARGS, K_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
COMMENTARY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
L_OPEN, L_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
G_OPEN, G_CLOSE, Q = "<|tool_call>", "<tool_call|>", '<|"|>'
C_OPEN, C_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
P_OPEN, P_CLOSE = "<|tool_call|>", "<|/tool_call|>"
M_OPEN, M_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
ATEM = '<atem:function_calls><atem:invoke name="{}">{}</atem:invoke></atem:function_calls>'
SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "number"},
            "note": {"type": "string"},
            "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "rows": {"$ref": "#/$defs/Rows"},
            "any": {},
            "size": {"enum": [1, 2]},
            "loop": {"$ref": "#/properties/loop"},
        },
        "$defs": {"Rows": {"type": "array"}},
    }
}

GOOD = [
    ("hermes", 'I look.\n<tool_call>{"arguments": {}, "name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
     [("a", "{}"), ("b", "{}")], "I look."),
    ("hermes", '<tool_call>{"name": "say", "arguments": {"x": "</tool_call><think>\\"}"}}</tool_call> done ',
     [("say", '{"x": "</tool_call><think>\\"}"}')], "done "),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [("now", "{}")], ""),
    ("glm", "<tool_call>add<arg_key>note</arg_key><arg_value> 1 </arg_value></tool_call>", [("add", '{"note": " 1 "}')],
     ""),
    ("llama3", '\n {"type": "function", "name": "add", "parameters": {}} ', [("add", "{}")], ""),
    ("llama3", '<|python_tag|>{"name": "a", "parameters": {}}; ', [("a", "{}")], "; "),
    ("llama3", 'Wait. <|python_tag|>{"name": "now"}', [("now", "{}")], "Wait."),
    ("llama3", '{"answer": {"name": "add", "parameters": {}}}', [], '{"answer": {"name": "add", "parameters": {}}}'),
    ("llama3", 'See {"name": "add", "parameters": {}}', [], 'See {"name": "add", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]b[ARGS]{}',
     [("a", '{"x": "[TOOL_CALLS]"}'), ("b", "{}")], ""),
    ("mistral", "[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS] {}", [("a", "{}")], ""),
    ("deepseek", f'Hm.{SECTION}{CALL}a{SEP}{{"x": "{CALL_END}"}}{CALL_END}{CALL}b{SEP}{{}}{CALL_END}{SECTION_END}',
     [("a", f'{{"x": "{CALL_END}"}}'), ("b", "{}")], "Hm."),
    ("harmony", f'{COMMENTARY}{{"a": "<|call|>"}}', [("add", '{"a": "<|call|>"}')], ""),
    ("harmony", " to=functions.add<|channel|>commentary json<|message|>{}<|call|>", [("add", "{}")], ""),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.add<|channel|>commentary"
     "<|message|> {} <|call|>", [("add", "{}")], "I look."),
    ("harmony", "<|channel|>final<|message|> It is 4. <|return|>", [], " It is 4. "),
    ("harmony", "No marks\n", [], "No marks\n"),
    ("harmony", "Hi <|channel|>final<|message|>there", [], "Hi\nthere"),
    ("harmony", "I write to=functions.rm <|channel|>commentary<|message|>{}<|call|>", [],
     "I write to=functions.rm\n{}"),
    ("lfm2", f"Hm. {L_OPEN} [ add( a=1 , b = -2.5 ) ] {L_CLOSE}", [("add", '{"a": 1, "b": -2.5}')], "Hm."),
    ("lfm2", f"{L_OPEN}[a(x='it\\'s', y=\"\\u00e9\\n\"), b(z=[1, null, (True, None)], w={{'k': false}},)]{L_CLOSE}",
     [("a", '{"x": "it\'s", "y": "\u00e9\\n"}'), ("b", '{"z": [1, null, [true, null]], "w": {"k": false}}')], ""),
    ("lfm2", f"{L_OPEN}[say(x='it's \"so\"')]{L_CLOSE}", [("say", '{"x": "it\'s \\"so\\""}')], ""),
    ("lfm2", f"{L_OPEN}[say(x='{L_CLOSE}<think>')]{L_CLOSE}", [("say", f'{{"x": "{L_CLOSE}<think>"}}')], ""),
    ("lfm2", f"{L_OPEN}[say(x='\\d', y='\\ud83d\\ude00')]{L_CLOSE}", [("say", '{"x": "\\\\d", "y": "\U0001f600"}')],
     ""),
    (
        "gemma4",
        f"I look.{G_OPEN}call:add{{a:1,note:{Q}x, }}]{Q},more:{{k:[true,null,{{}}],{Q}odd:key{Q}:-1.5}}}}{G_CLOSE}",
        [("add", '{"a": 1, "note": "x, }]", "more": {"k": [true, null, {}], "odd:key": -1.5}}')],
        "I look.",
    ),
    ("gemma4", f"{G_OPEN}call:a{{}}{G_CLOSE}{G_OPEN}call:b{{x:[]}}{G_CLOSE}", [("a", "{}"), ("b", '{"x": []}')], ""),
    ("cohere", f'{C_OPEN}[\n {{"tool_call_id": "0", "tool_name": "a", "parameters": {{"x": 1}}}}\n]{C_CLOSE}',
     [("a", '{"x": 1}')], ""),
    ("cohere", "<|START_RESPONSE|>It is 4.<|END_RESPONSE|>", [], "It is 4."),
    ("phi4", f'{P_OPEN}[{{"name": "a", "arguments": {{}}}}, {{"name": "b"}}]{P_CLOSE}', [("a", "{}"), ("b", "{}")], ""),
    (
        "minimax",
        f'So.\n{M_OPEN}\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="note">2\n'
        f'</parameter>\n</invoke>\n<invoke name="now"></invoke>\n{M_CLOSE}',
        [("add", '{"a": 1, "note": "2\\n"}'), ("now", "{}")],
        "So.",
    ),
    ("muse", " to=user<|message|>It is 4.", [], "It is 4."),
    ("muse", "No marks\n", [], "No marks\n"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "calls", "content"), GOOD)
def test_valid_turn_is_parsed_into_calls_and_text(
    family: str, text: str, calls: list[tuple[str, str]], content: str
) -> None:
    reply = load_parser(family, SCHEMAS).parse(text)
    assert [(call.name, call.arguments) for call in reply.calls] == calls
    assert (reply.content, reply.problems, reply.reasoning) == (content, (), "")


BAD = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "its JSON ends too early"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "</tool_call> is missing"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "',' or '}' is missing"),
    ("hermes", '<tool_call>{"name": "add", "parameters": {}}</tool_call>', 'it has no "arguments"'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'it has no "name"'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "its name is no string"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "needs the name of a tool"),
    ("hermes", '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>', "raw line break"),
    ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "<function= is missing"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "</parameter> is missing"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>", "<parameter= or </function> is missing"),
    ("qwen3_coder", "<tool_call><function=add></function>", "</tool_call> is missing"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "needs the name of a tool"),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "the parameter 'a' is given twice",
    ),
    ("glm", "<tool_call>add", "</tool_call> is missing"),
    ("glm", "<tool_call>\n<arg_key>a</arg_key>", "needs the name of a tool"),
    ("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call>", "<arg_value> is missing"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1", "</arg_value> is missing"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key>"
     "<arg_value>2</arg_value></tool_call>", "the argument 'a' is given twice"),
    ("hermes", '<tool_call>{"name": "add", "name": "rm", "arguments": {}}</tool_call>', '"name" is given twice'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "a number is too large"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {"9" * 5000}}}</tool_call>', "a number is too large"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {"[" * 90_000}', "nested deeper than"),
    ("hermes", "<tool_call>__import__('os').system('id')</tool_call>", "a JSON object is missing"),
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
    ("mistral", "[TOOL_CALLS]<think>[TOOL_CALLS]a[ARGS]{}", "needs the name of a tool"),
    ("deepseek", f"{CALL}<think>{CALL}a{SEP}{{}}{CALL_END}", "needs the name of a tool"),
    ("kimi", f"{K_CALL}functions.a:{'9' * 9000}{K_ARGS}{{}}{K_CALL_END}", "its id is not"),
    ("kimi", f"{K_CALL}functions.a:\u0661{K_ARGS}{{}}{K_CALL_END}", "its id is not"),
    ("harmony", "<|channel|>analysis to=functions.add<|message|>{}<|call|>", "on the commentary channel"),
    ("harmony", "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>", "header of a message"),
    ("lfm2", L_OPEN, "[ is missing"),
    ("lfm2", f"{L_OPEN}[]{L_CLOSE}", "the list of calls is empty"),
    ("lfm2", f"{L_OPEN}[add(1)]{L_CLOSE}", "an argument is not written as KEY=VALUE"),
    ("lfm2", f"{L_OPEN}[add(a=1, a=2)]{L_CLOSE}", "the argument 'a' is given twice"),
    ("lfm2", f"{L_OPEN}[add(a=b)]{L_CLOSE}", "a value is missing"),
    ("lfm2", f"{L_OPEN}[add(a=1", "it ends too early"),
    ("lfm2", f"{L_OPEN}[add(a='x", "a string is not closed"),
    ("lfm2", f"{L_OPEN}[add(a=1)]", f"{L_CLOSE} is missing"),
    ("lfm2", f"{L_OPEN}[add]{L_CLOSE}", "NAME( is missing"),
    ("lfm2", f"{L_OPEN}[add(a={{1: 2}})]{L_CLOSE}", "a key in quotes is missing"),
    ("lfm2", L_CLOSE, "ends no call"),
    ("gemma4", G_OPEN, "call: is missing"),
    ("gemma4", f"{G_OPEN}call:add", "{ is missing after the name"),
    ("gemma4", f"{G_OPEN}call:add{{a:", "a value is missing"),
    ("gemma4", f"{G_OPEN}call:add{{a:{Q}x", f"{Q} is missing"),
    ("gemma4", f"{G_OPEN}call:add{{a:1,a:2}}{G_CLOSE}", "the argument 'a' is given twice"),
    ("gemma4", f"{G_OPEN}call:add{{1}}{G_CLOSE}", "a KEY: is missing"),
    ("gemma4", f"{G_OPEN}call:add{{a:1}}", f"{G_CLOSE} is missing"),
    ("cohere", f"{C_OPEN}{{}}{C_CLOSE}", "a JSON list is missing"),
    ("cohere", f'{C_OPEN}[{{"tool_name": "a", "arguments": {{}}}}]{C_CLOSE}', 'it has no "parameters"'),
    ("phi4", f"{P_OPEN}[]{P_CLOSE}", "the list of calls is empty"),
    ("phi4", f'{P_OPEN}[{{"name": "a"}}]', f"{P_CLOSE} is missing"),
    ("minimax", f"{M_OPEN}{M_CLOSE}", '<invoke name=" is missing'),
    ("minimax", f'{M_OPEN}<invoke name="a"><parameter name="x">1</invoke>{M_CLOSE}', "</parameter> is missing"),
    ("minimax", f'{M_OPEN}<invoke name=""></invoke>{M_CLOSE}', "needs the name of a tool"),
    ("minimax", f'{M_OPEN}<invoke name="a"><parameter name="x">1</parameter><parameter name="x">2</parameter></invoke>',
     "the parameter 'x' is given twice"),
    ("muse", f" to=a<|message|>{ATEM.format('a', '')[:-5]}", "</atem:function_calls> is missing"),
    ("lfm2", f"{L_OPEN}[add(a=__import__('os').system('id'))]{L_CLOSE}", "a value is missing"),
    ("lfm2", f"{L_OPEN}[add(a={'[' * 90_000}", "nested deeper than"),
    ("lfm2", f"{L_OPEN}[add(a={'9' * 9000})]{L_CLOSE}", "a number is too large"),
    ("lfm2", f"{L_OPEN}[add(a=1e999)]{L_CLOSE}", "a number is too large"),
    ("lfm2", f"{L_OPEN}[{'x' * 9000}(a=1)]{L_CLOSE}", "NAME( is missing"),
    ("lfm2", f"{L_OPEN}[add(a=0x10)]{L_CLOSE}", "',' or ')' is missing"),
    ("gemma4", f"{G_OPEN}call:add{{a:{'{b:' * 90_000}", "nested deeper than"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "reason"), BAD)
def test_invalid_turn_has_no_call_and_an_explanation_for_the_policy(family: str, text: str, reason: str) -> None:
    parser = load_parser(family, SCHEMAS)
    reply = parser.parse(text)
    assert reply.calls == () and reason in reply.problems[0]
    assert all("Write a call so:\n" in problem and len(problem) < 600 for problem in reply.problems)
    shown = reply.problems[0].partition("Write a call so:\n")[2]
    assert [(call.name, call.arguments) for call in parser.parse(shown).calls] == [("NAME", '{"KEY": "VALUE"}')]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm"])
def test_malformed_call_stays_in_the_text_beside_valid_calls(family: str) -> None:
    parser = load_parser(family)
    good = parser.parse("<tool_call>{").problems[0].partition("so:\n")[2]
    reply = parser.parse(f"<tool_call><oops></tool_call>{good}<tool_call>{{</tool_call>")
    assert [call.name for call in reply.calls] == ["NAME"]
    assert reply.content == "<tool_call><oops></tool_call>\n<tool_call>{</tool_call>"
    assert len(reply.problems) == 2


VALUES = [
    ("a", "7", 7),
    ("a", "seven", "seven"),
    ("a", '"7"', '"7"'),
    ("b", "2", 2),
    ("note", "7", "7"),
    ("flag", "True", True),
    ("maybe", "None", None),
    ("maybe", "3", 3),
    ("rows", "[1, {}]", [1, {}]),
    ("rows", "[" * 90_000, "[" * 90_000),
    ("any", "5", 5),
    ("size", "2", 2),
    ("loop", "{}", {}),
    ("stranger", "5", "5"),
]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_field_is_what_the_schema_says_it_is(family: str, key: str, text: str, value: object) -> None:
    turn = f"<tool_call>add\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    if family == "qwen3_coder":
        turn = f"<tool_call>\n<function=add>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = load_parser(family, SCHEMAS).parse(turn).calls
    assert json.loads(call.arguments) == {key: value}
    (untyped,) = load_parser(family).parse(turn).calls
    assert json.loads(untyped.arguments) == {key: text}


def test_a_field_may_be_described_by_the_additional_properties() -> None:
    schemas = {"put": {"type": "object", "additionalProperties": {"type": "integer"}}}
    turn = "<tool_call>put<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert load_parser("glm", schemas).parse(turn).calls[0].arguments == '{"x": 1}'


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


REASONING = [
    ("gemma4", f"<|channel>thought\nSo.\n<channel|>{G_OPEN}call:now{{}}{G_CLOSE}"),
    ("cohere", f'<|START_THINKING|>So.<|END_THINKING|>{C_OPEN}[{{"tool_name": "now"}}]{C_CLOSE}'),
    ("lfm2", f"<think>So.</think>{L_OPEN}[now()]{L_CLOSE}"),
    ("muse", f" to=self<|message|>So.<|eom|><|start|>assistant to=now<|message|>{ATEM.format('now', '')}"),
]


@pytest.mark.parametrize(("family", "text"), REASONING)
def test_reasoning_is_separated_from_the_calls_after_it(family: str, text: str) -> None:
    reply = load_parser(family).parse(text)
    assert (reply.reasoning, reply.content, reply.problems) == ("So.", "", ())
    assert [call.name for call in reply.calls] == ["now"]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<|START_ACTION|>{{ calls | tojson }}", "cohere"),
        ("<|tool_call|>{{ calls }}<|/tool_call|>", "phi4"),
        ('<minimax:tool_call><invoke name="{{ name }}">', "minimax"),
    ],
)
def test_family_without_a_template_of_trl_is_chosen_by_its_marks(template: str, family: str) -> None:
    assert choose_parser(template).name == family
