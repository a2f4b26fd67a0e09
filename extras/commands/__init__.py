"""Commands of `ringspark` besides `train` and `score`."""
