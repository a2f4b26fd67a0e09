"""Mixtures of experts: `routing` assigns tokens to experts, `layer` computes them."""
