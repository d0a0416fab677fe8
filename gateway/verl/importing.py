"""verl's names, for the files that a configuration names: where no installed verl has them."""

from __future__ import annotations

from gateway.standing import Finder
from gateway.verl.offered import OFFERED, VERSION, refusal

FINDER = Finder(OFFERED, refusal, VERSION)
standing_in = FINDER.standing_in
