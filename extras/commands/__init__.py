"""Commands of `ringspark` besides `train`."""
