"""Quantiles of a regression's label, and prediction intervals by split-conformal prediction."""
