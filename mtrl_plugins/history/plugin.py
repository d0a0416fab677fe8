"""What the plug-in `history` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="history",
    run_sections={
        "history": "mtrl_plugins.history.settings:HistorySettings",
        "delegate": "mtrl_plugins.history.delegate_settings:DelegateSettings",
    },
)
