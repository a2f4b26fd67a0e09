"""Writes and reads 488 MiB of weights by safetensors and by ringspark.

$ python tensor_files.py write save
save 977 MiB more at the peak
$ python tensor_files.py write save_file
save_file 0 MiB more at the peak
$ python tensor_files.py write ours
ours 2 MiB more at the peak
$ python tensor_files.py read mmap
mmap Cannot allocate memory (os error 12)
$ python tensor_files.py read pread
pread Cannot allocate memory (os error 12)
"""

import os
import resource
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from ringspark.estimators.training.checkpoint import tensor_file


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if sys.argv[1] == "write":
    weights = {f"{n}": torch.zeros(8_000_000) for n in range(16)}  # 488 MiB
    before = peak()
    with open("weights.safetensors", "wb") as file:
        if sys.argv[2] == "save":
            file.write(save(weights))
        elif sys.argv[2] == "save_file":
            save_file(weights, "weights.safetensors")
        else:
            tensor_file.write(weights, file)
    print(sys.argv[2], peak() - before, "MiB more at the peak")
else:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + (200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        safe_open("weights.safetensors", "pt", backend=sys.argv[2])
    except MemoryError as error:
        print(sys.argv[2], error)
