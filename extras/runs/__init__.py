"""Lists and removes runs."""
