"""The model that learns: what was written goes in with what it is worth, and better weights come out."""

from __future__ import annotations

from trainer.policy.errors import PolicyError
from trainer.policy.learner import Learner
from trainer.policy.memory import Plan, plan
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, LoraSettings, UpdateSettings

__all__ = ["CriticSettings", "Learner", "LoraSettings", "Plan", "Policy", "PolicyError", "UpdateSettings", "plan"]
