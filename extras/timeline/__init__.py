"""Where the time of a training went: spans of every rank on one axis of time."""
