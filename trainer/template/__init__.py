"""The one place where text becomes ids: prompts, tails, the probe before a run, the check after a rollout."""

from .chat import Tool, schema
from .drift import Cause, Drift, drifts
from .errors import TemplateError
from .load import SHIPPED
from .probe import Finding, ProbeReport, probe
from .template import Settings, Template
from .written import written

__all__ = [
    "SHIPPED",
    "Cause",
    "Drift",
    "Finding",
    "ProbeReport",
    "Settings",
    "Template",
    "TemplateError",
    "Tool",
    "drifts",
    "probe",
    "schema",
    "written",
]
