"""Facts about people in cities, which only a tool can tell."""
