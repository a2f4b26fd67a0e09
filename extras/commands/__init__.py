"""Commands of `ringspark` beside `train` and `score`."""
