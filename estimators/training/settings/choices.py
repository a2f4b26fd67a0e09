"""Types of the settings whose value is one of a few fixed words."""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
InferencePrecision = Literal["fp32", "bf16", "int8"]
Task = Literal["classification", "regression", "any"]
Keep = Literal["last", "best"]
Offload = Literal["none", "host", "disk"]
WeightOffload = Literal["none", "disk"]
NonFinite = Literal["stop", "skip", "rollback"]
Compression = Literal["none", "bits", "int8", "fp8"]
Cache = Literal["auto", "memory", "disk", "none"]
DataPlace = Literal["copy", "inPlace", "auto"]
InitialState = Literal["weights", "optimizer"]
HandleInvalid = Literal["error", "skip", "keep"]
TrackerName = Literal["console", "jsonl", "mlflow", "tensorboard"]
