"""A rank keeps the memory of freed tensors, and returns it when it ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource

import torch

from ringspark.estimators.launch.host_allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        # Together 160 MiB: 40,960 pages.
        tensors = [torch.ones(4 << 20) for _ in range(10)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

faults()
unused, before = resident(), faults()
with keep_freed_memory():
    faults()
    kept = faults()
print(unused, before, kept, resident())
"""


def test_freed_tensors_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    unused, before, kept, after = map(int, done.stdout.split())
    assert before > 40_960
    assert kept < 1_024
    assert after < unused + 4_096
