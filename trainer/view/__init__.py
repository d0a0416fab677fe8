"""Reading a run: what a person sees is a fold over ledgers, and nothing here is ever decided by."""

from trainer.view.frames import Frames, load

__all__ = ["Frames", "load"]
