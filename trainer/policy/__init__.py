"""The model that learns: what was written goes in with what it is worth, and better weights come out."""
