"""The trained model: logprobs, optimizer steps, checkpoints, memory planning, and the weights for the engine."""
