"""ms-swift's names, for files of plug-ins: where no installed ms-swift has them."""

from __future__ import annotations

from gateway.standing import Finder
from trainer.swift.offered import OFFERED, VERSION, refusal

FINDER = Finder(OFFERED, refusal, VERSION, "ms-swift")
standing_in = FINDER.standing_in
