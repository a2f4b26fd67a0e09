"""Settings that have options of their own, one frozen dataclass each."""
