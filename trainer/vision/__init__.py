"""What models see: pictures become numbers once, take their places among the ids, and are the same to all who look."""
