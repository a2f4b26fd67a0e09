"""Exports a trained network: ONNX, ExecuTorch, and torch's own programs."""
