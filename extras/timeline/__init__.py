"""Timeline of a training: spans of every rank on one time axis."""
