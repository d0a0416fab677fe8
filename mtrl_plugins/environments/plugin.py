"""What the plug-in `environments` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="environments",
    run_sections={"environment": "mtrl_plugins.environments.settings:EnvironmentSettings"},
    environments={
        "gymnasium": "mtrl_plugins.environments.settings:GymnasiumSettings",
        "textarena": "mtrl_plugins.environments.settings:TextArenaSettings",
        "openenv": "mtrl_plugins.environments.settings:OpenEnvSettings",
    },
)
