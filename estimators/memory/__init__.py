"""Refuses a training that a worker's share of its host cannot hold."""
