"""Interactions, or feedback: simulated users and judges that reply between the policy's turns and score them."""
