"""`python -m trainer.cli` is `mtrl-train`."""

from trainer.cli import main

main()
