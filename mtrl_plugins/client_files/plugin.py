"""What the plug-in `client_files` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="client_files",
    servers_files=("mtrl_plugins.client_files.client_files:translate_file",),
)
