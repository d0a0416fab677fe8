"""What the plug-in `demo` adds."""

from pathlib import Path

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="demo",
    train_sections={"demo": "mtrl_plugins.demo.settings:DemoSettings"},
    examples={
        "demo": "mtrl_plugins.demo.facts.facts_demo:DEMO",
        "sight": "mtrl_plugins.demo.sight.sight_demo:DEMO",
        "shelves": "mtrl_plugins.demo.shelves.shelves_demo:DEMO",
        "shell": "mtrl_plugins.demo.shell.shell_demo:DEMO",
    },
    jobs=Path(__file__).with_name("jobs"),
)
