"""Rows of any shape become tasks; what is wrong with a row is told by file and line before anything starts."""

from trainer.data.check import check
from trainer.data.curriculum import Course, Curriculum, Stage, Until
from trainer.data.sampler import Sampler
from trainer.data.tasks import Tasks, load

__all__ = ["Course", "Curriculum", "Sampler", "Stage", "Tasks", "Until", "check", "load"]
