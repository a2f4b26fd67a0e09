"""Offloads or compresses the tensors that autograd saves in the forward pass for the backward pass.

Offload (vDNN, Rhu et al. 2016) and the compression "bits" (Gist, Jain et al. 2018) keep every gradient
bitwise equal on the CPU. "int8" and "fp8" change gradients by a small error. Parameters and buffers are not
touched.
"""
