"""Tools written in Python: functions and `BaseTool` classes, run in the gateway's process."""
