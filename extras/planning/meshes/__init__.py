"""Chooses the mesh of a training: `plan_parallelism`, and `parallelism="auto"`."""
