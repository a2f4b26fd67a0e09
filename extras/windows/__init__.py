"""Windows over time series: the rows of each key, in time order, as sequences for a network."""
