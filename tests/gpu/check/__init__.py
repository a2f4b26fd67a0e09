"""Tests and measures ringspark on one GPU in a few minutes, without Spark, and writes a page of figures.

Invariant: no part can stop another part. Each part runs in processes of its own with a time limit, because an
error of CUDA makes a process unusable, and a kernel may hang. `command.py` starts the parts and never imports
torch; `child.py` runs one part; `registry.py` lists the parts.
"""
