"""Training sharded over several processes (ranks): launching, commands from rank 0, sharded weights and checkpoints."""
