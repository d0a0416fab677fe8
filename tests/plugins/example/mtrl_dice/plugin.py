"""What the plug-in `dice` adds."""

from gateway.plugins import Plugin

PLUGIN = Plugin(
    name="dice",
    run_sections={"dice": "mtrl_dice.settings:DiceSettings"},
    train_commands=("mtrl_dice.dice_command",),
)
