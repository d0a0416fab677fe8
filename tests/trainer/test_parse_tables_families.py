"""Tables of good, bad and hostile turns: Gemma 4, LFM2, Cohere, Phi-4, MiniMax and Muse Glimmer."""

from __future__ import annotations

import pytest

from trainer.parse.choose import choose_parser, load_parser

L_OPEN, L_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
G_OPEN, G_CLOSE, Q = "<|tool_call>", "<tool_call|>", '<|"|>'
C_OPEN, C_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
P_OPEN, P_CLOSE = "<|tool_call|>", "<|/tool_call|>"
M_OPEN, M_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
ATEM = '<atem:function_calls><atem:invoke name="{}">{}</atem:invoke></atem:function_calls>'
ATEM_FIELD = '<atem:parameter name="a">1</atem:parameter>'

GOOD = [
    ("lfm2", f"Hm. {L_OPEN} [ add( a=1 , b = -2.5 ) ] {L_CLOSE}", [("add", '{"a": 1, "b": -2.5}')], "Hm."),
    (
        "lfm2",
        f"{L_OPEN}[a(x='it\\'s', y=\"\\u00e9\\n\"), b(z=[1, null, (True, None)], w={{'k': false}},)]{L_CLOSE}",
        [("a", '{"x": "it\'s", "y": "\u00e9\\n"}'), ("b", '{"z": [1, null, [true, null]], "w": {"k": false}}')],
        "",
    ),
    ("lfm2", f"{L_OPEN}[say(x='it's \"so\"')]{L_CLOSE}", [("say", '{"x": "it\'s \\"so\\""}')], ""),
    ("lfm2", f"{L_OPEN}[say(x='{L_CLOSE}<think>')]{L_CLOSE}", [("say", f'{{"x": "{L_CLOSE}<think>"}}')], ""),
    (
        "lfm2",
        f"{L_OPEN}[say(x='\\d', y='\\ud83d\\ude00')]{L_CLOSE}",
        [("say", '{"x": "\\\\d", "y": "\U0001f600"}')],
        "",
    ),
    (
        "gemma4",
        f"I look.{G_OPEN}call:add{{a:1,note:{Q}x, }}]{Q},more:{{k:[true,null,{{}}],{Q}odd:key{Q}:-1.5}}}}{G_CLOSE}",
        [("add", '{"a": 1, "note": "x, }]", "more": {"k": [true, null, {}], "odd:key": -1.5}}')],
        "I look.",
    ),
    ("gemma4", f"{G_OPEN}call:a{{}}{G_CLOSE}{G_OPEN}call:b{{x:[]}}{G_CLOSE}", [("a", "{}"), ("b", '{"x": []}')], ""),
    (
        "cohere",
        f'{C_OPEN}[\n {{"tool_call_id": "0", "tool_name": "a", "parameters": {{"x": 1}}}}\n]{C_CLOSE}',
        [("a", '{"x": 1}')],
        "",
    ),
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
]


BAD = [
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
    (
        "minimax",
        f'{M_OPEN}<invoke name="a"><parameter name="x">1</parameter><parameter name="x">2</parameter></invoke>',
        "the parameter 'x' is given twice",
    ),
    ("muse", f" to=a<|message|>{ATEM.format('a', '')[:-5]}", "</atem:function_calls> is missing"),
    # Hostile ones.
    ("lfm2", f"{L_OPEN}[add(a=__import__('os').system('id'))]{L_CLOSE}", "a value is missing"),
    ("lfm2", f"{L_OPEN}[add(a={'[' * 90_000}", "nested deeper than"),
    ("lfm2", f"{L_OPEN}[add(a={'9' * 9000})]{L_CLOSE}", "a number is too large"),
    ("lfm2", f"{L_OPEN}[add(a=1e999)]{L_CLOSE}", "a number is too large"),
    ("lfm2", f"{L_OPEN}[{'x' * 9000}(a=1)]{L_CLOSE}", "NAME( is missing"),
    ("lfm2", f"{L_OPEN}[add(a=0x10)]{L_CLOSE}", "',' or ')' is missing"),
    ("gemma4", f"{G_OPEN}call:add{{a:{'{b:' * 90_000}", "nested deeper than"),
]


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
