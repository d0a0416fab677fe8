"""The folder that `mtrl-train init` writes: a job with tool, server, reward, interaction, tasks and tests."""
