"""Qwen2.5-VL: to whoever hands it pictures, it is a Qwen2-VL; its eyes attend within windows."""

from __future__ import annotations

from trainer.vision.qwen2_vl import Qwen2VL


class Qwen25VL(Qwen2VL):
    """Its own template writes pictures into whatever message they stand in, tools' included."""

    layout = "in_tool_message"
