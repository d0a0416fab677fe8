"""Whoever answers the policy between its turns is an interaction: started, asked, and always finalized."""
