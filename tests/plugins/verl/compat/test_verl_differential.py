"""Differential tests: our GSM8K and geometry3k rules beside verl's own files, which `make peers` installs."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mtrl_plugins.verl import geo3k_rule, gsm8k_rule

SCORES = Path(__file__).parents[4] / ".peers" / "verl" / "utils" / "reward_score"
PIECES = ["#### ", "####", "42", "-5", "1,000", "3.50", ".", ",", "$", "%", " ", "\n", "-", "so it goes " * 30]
ANSWER = st.sampled_from(["42", "-5", "1000", "3.50", ".", "42.", ""])
BOXES = ["<think>", "</think>", r"\boxed{", "}", "3", r"\frac{1}{2}", "0.5", "3^\\circ", r"\sqrt{2}", " ", "\n", "x = "]


def load_score(name: str) -> Any:
    """One of verl's scoring modules, loaded without verl itself."""
    spec = spec_from_file_location(f"verl_{name}", SCORES / f"{name}.py")
    assert spec is not None and spec.loader is not None, f"{SCORES} is missing: run `make peers`"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GSM8K, GEO3K = load_score("gsm8k"), load_score("geo3k")


@given(text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join), truth=ANSWER)
def test_gsm8k_rule_equals_verls_for_any_text(text: str, truth: str) -> None:
    for method in ("strict", "flexible"):
        ours = gsm8k_rule.compute_score(text, truth, method, format_score=0.1)
        assert ours == GSM8K.compute_score(text, truth, method, format_score=0.1)
        assert gsm8k_rule.extract_solution(text, method) == GSM8K.extract_solution(text, method)


@given(text=st.lists(st.sampled_from(BOXES), max_size=10).map("".join), truth=st.sampled_from(["3", "0.5", "2", ""]))
def test_geometry3k_rule_equals_verls_for_any_text(text: str, truth: str) -> None:
    for use_boxed in (True, False):
        assert geo3k_rule.compute_score(text, truth, use_boxed) == GEO3K.compute_score(text, truth, use_boxed)
