"""A rank uses the memory of freed tensors again, until it ends."""

from __future__ import annotations

import os
import resource

import pytest
from programs import run_program

PROGRAM = """
import ctypes

import torch

from ringspark.estimators.launch.host_allocator import keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

def mapped():
    # Blocks that glibc returns to the kernel when they are freed.
    return library.mallinfo2().hblks

blocks = mapped()
first = torch.ones(31 << 18)
outside = mapped() - blocks
with keep_freed_memory():
    second = torch.ones(31 << 18)
    inside = mapped() - blocks - outside
    used = resident()
    tensors = [torch.ones(4 << 20) for _ in range(10)]
    del tensors
    kept = resident() - used
print(outside, inside, kept, resident() - used)
"""


def measure(**variables: str) -> list[int]:
    """Returns mapped blocks of a tensor outside and inside, and MiB kept of freed tensors."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    outside, inside, kept, after = map(int, run_program(PROGRAM, env=environment | variables).stdout.split())
    pages = (1 << 20) / resource.getpagesize()
    return [outside, inside, round(kept / pages), round(after / pages)]


def test_freed_tensors_are_kept_until_the_end():
    outside, inside, kept, after = measure()
    assert (outside, inside) == (1, 0)
    assert kept > 100
    assert after < 16


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_MMAP_THRESHOLD_": "1048576"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}],
)
def test_thresholds_that_the_user_set_stay(variables):
    assert measure(**variables)[:2] == [1, 1]
