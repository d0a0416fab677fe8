"""What was said to ms-swift by flags becomes a run file, or is refused by name: nothing is left out silently."""
