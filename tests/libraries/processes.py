"""Runs multiprocessing, torch's RPC, peft and pydantic.

$ python processes.py
left behind: True
a peer runs eval: 42
['base_model.model.0.base_layer.weight', 'base_model.model.0.base_layer.bias', 'base_model.model.0.l ...
['0.base_layer.weight', '0.base_layer.bias', '0.lora_A.default.weight', '0.lora_B.default.weight']
Entry(rows=2, epochs=1)
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import torch.distributed.rpc as rpc
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from pydantic import TypeAdapter
from torch import nn

KILLED = """
import os, signal
from multiprocessing import resource_tracker, shared_memory
shared_memory.SharedMemory(create=True, size=1024, name="killed")
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
subprocess.run([sys.executable, "-c", KILLED])
print("left behind:", os.path.exists("/dev/shm/killed"))
os.remove("/dev/shm/killed")


os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
rpc.init_rpc("server", rank=0, world_size=1)
print("a peer runs eval:", rpc.rpc_sync("server", eval, ("6 * 7",)))
rpc.shutdown()


for adapt in (
    lambda network, config: get_peft_model(network, config),
    lambda network, config: inject_adapter_in_model(config, network),
):
    print(list(adapt(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"])).state_dict()))


@dataclass
class Entry:
    rows: int
    epochs: int = 1


print(TypeAdapter(Entry).validate_json('{"rows": 2}', strict=True))
