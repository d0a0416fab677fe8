"""The one place where text becomes ids: prompts, tails, the probe before a run, the check after a rollout."""

from trainer.template.chat_template import Tool, function_schema
from trainer.template.drift import Cause, Drift, find_drifts
from trainer.template.errors import TemplateError
from trainer.template.probe import Finding, ProbeReport, probe
from trainer.template.render_reply import render_reply
from trainer.template.template import Settings, Template
from trainer.template.tokenizer import BUILTIN_TEMPLATES

__all__ = [
    "BUILTIN_TEMPLATES",
    "Cause",
    "Drift",
    "Finding",
    "ProbeReport",
    "Settings",
    "Template",
    "TemplateError",
    "Tool",
    "find_drifts",
    "function_schema",
    "probe",
    "render_reply",
]
