"""Settings that have several options, one frozen dataclass each."""
