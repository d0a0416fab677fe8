"""What the plug-in `swift` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="swift",
    steppers=("mtrl_plugins.swift.stepper:make_swift_stepper",),
    stand_ins=("mtrl_plugins.swift.compat_names:FINDER",),
)
