"""Data: reads rows of any source as tasks, and draws them in the order of a curriculum."""

from trainer.data.curriculum import Curriculum, Stage, TaskStream, Until
from trainer.data.tasks import RowTasks, TaskSampler, check_task_names, load_rows

__all__ = ["Curriculum", "RowTasks", "Stage", "TaskSampler", "TaskStream", "Until", "check_task_names", "load_rows"]
