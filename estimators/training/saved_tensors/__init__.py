"""Offloads or compresses the tensors that autograd saves in the forward pass for the backward pass.

Offload and the compression "bits" keep every gradient bitwise equal (on the CPU). "int8" and "fp8" change
gradients by a measured error, and keep NaN and Inf, so that a loss scaler still sees an overflow. Parameters
and buffers, their views and their autocast copies are not touched.

The techniques are vDNN's (Rhu et al. 2016) and Gist's (Jain et al. 2018).
"""
