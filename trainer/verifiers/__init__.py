"""Environments of PrimeIntellect's `verifiers`, through a host process: `trainer.environments` runs the rest."""
