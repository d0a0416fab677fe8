"""What the plug-in `task_maker` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(name="task_maker", train_commands=("mtrl_plugins.task_maker.make_tasks_command",))
