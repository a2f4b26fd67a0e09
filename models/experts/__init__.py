"""Mixtures of experts: `routing` decides which expert computes which token, `layer` has them do it."""
