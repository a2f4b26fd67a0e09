"""Allowlist of operators for saved programs, which may come from untrusted files.

Operators are not allowed if they write into their arguments, return uninitialized memory or open files. They
must not skip checks (`_unsafe_*`, `native_batch_norm`), set a tensor's storage (`as_strided`, `set_`,
`resize_`), or create sparse, nested or quantized tensors.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

_OPERATOR = re.compile(r"aten\.(\w+)\.(\w+)")

# Each name allows all overloads that do not write into their arguments.
OPERATORS = frozenset({
    "linear", "addmm", "addmv", "addbmm", "baddbmm", "bmm", "mm", "mv", "dot", "matmul", "einsum",
    "outer", "ger", "kron", "bilinear", "cdist", "tensordot", "chain_matmul", "linalg_vector_norm",
    "linalg_norm", "norm", "cosine_similarity", "pairwise_distance", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "batch_norm", "layer_norm", "group_norm",
    "instance_norm", "rms_norm", "embedding", "embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention", "dropout",
    "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "relu", "relu6", "elu", "celu", "selu",
    "gelu", "glu", "silu", "mish", "sigmoid", "log_sigmoid", "tanh", "softplus", "softshrink",
    "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "prelu", "rrelu", "threshold",
    "softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp", "logaddexp", "logaddexp2",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "pad", "constant_pad_nd", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "im2col", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "grid_sampler",
    "affine_grid_generator", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "view",
    "view_as", "reshape", "reshape_as", "permute", "transpose", "t", "numpy_T", "mT", "adjoint",
    "movedim", "moveaxis", "swapaxes", "swapdims", "flatten", "unflatten", "squeeze", "unsqueeze",
    "expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat", "repeat_interleave", "tile",
    "flip", "fliplr", "flipud", "roll", "rot90", "unfold", "diagonal", "diag", "diag_embed",
    "diagonal_scatter", "tril", "triu", "select", "slice", "narrow", "split", "split_with_sizes",
    "chunk", "tensor_split", "unbind", "cat", "concat", "stack", "hstack", "vstack", "dstack",
    "select_scatter", "slice_scatter", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d",
    "cartesian_prod", "gather", "index", "index_select", "index_put", "index_add", "index_copy",
    "index_fill", "index_reduce", "take", "take_along_dim", "scatter", "scatter_add", "scatter_reduce",
    "masked_fill", "masked_select", "masked_scatter", "where", "nonzero", "one_hot", "to", "_to_copy",
    "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "copy", "fill", "type_as",
    "float_power", "arange", "linspace", "logspace", "eye", "full", "full_like", "zeros", "zeros_like",
    "ones", "ones_like", "new_full", "new_zeros", "new_ones", "scalar_tensor", "add", "sub", "rsub",
    "mul", "multiply", "subtract", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod",
    "pow", "square", "sqrt", "rsqrt", "neg", "negative", "abs", "absolute", "sign", "sgn", "reciprocal",
    "addcmul", "addcdiv", "lerp", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "xlogy",
    "erf", "erfc", "erfinv", "lgamma", "digamma", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "arctan2", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "hypot", "deg2rad", "rad2deg", "logit",
    "floor", "ceil", "round", "trunc", "frac", "clamp", "clamp_min", "clamp_max", "clip", "maximum",
    "minimum", "fmax", "fmin", "nan_to_num", "special_expit", "special_logit", "special_erf",
    "special_log_softmax", "special_softmax", "special_xlogy", "eq", "ne", "lt", "le", "gt", "ge",
    "equal", "greater", "greater_equal", "less", "less_equal", "not_equal", "isnan", "isinf", "isfinite",
    "isposinf", "isneginf", "isclose", "logical_and", "logical_or", "logical_xor", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
    "bitwise_right_shift", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "sum", "nansum",
    "mean", "nanmean", "prod", "std", "std_mean", "var", "var_mean", "amax", "amin", "aminmax", "max",
    "min", "argmax", "argmin", "all", "any", "median", "nanmedian", "mode", "quantile", "nanquantile",
    "count_nonzero", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff", "sort", "argsort",
    "topk", "kthvalue", "msort", "bucketize", "searchsorted", "isin", "trapezoid", "cross", "vdot",
    "inner", "renorm", "complex", "real", "imag", "angle", "conj", "_conj", "resolve_conj",
    "resolve_neg", "view_as_real", "view_as_complex", "polar", "fft_fft", "fft_ifft", "fft_rfft",
    "fft_irfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn",
    "fft_rfftn", "fft_irfftn", "fft_fftshift", "fft_ifftshift", "sym_size", "sym_numel",
    "_assert_scalar", "_assert_async",
})  # fmt: skip

ON_SIZES: dict[str, Callable[..., Any]] = {
    f"size.{function.__name__.strip('_')}": function
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod),
        *(operator.neg, operator.pow, operator.getitem, operator.and_, operator.or_),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(math.ceil, math.floor, math.trunc, math.sqrt),
        *(torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite),
    )
}


class Device:
    """Stands, in a saved program, for the device of the program's inputs."""


def find_operator(name: str) -> Callable[..., Any]:
    if name in ON_SIZES:
        return ON_SIZES[name]
    match = _OPERATOR.fullmatch(name)
    if match is not None and match[1] in OPERATORS:
        found: Callable[..., Any] = getattr(getattr(torch.ops.aten, match[1]), match[2])
        is_operator = isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable
        if is_operator and name != "aten.lstm.data":
            checked: dict[str, Callable[..., Any]] = {"lstm": _lstm, "embedding_bag": _embedding_bag}
            return checked.get(match[1], found)
    raise ValueError(f"the program uses {name!r}, which is not an allowed operator")


def check_arguments(function: Callable[..., Any], args: list[Any], named: dict[str, Any]) -> None:
    """Raises ValueError if an argument asks for a tensor that is not strided or not on the inputs' device."""
    schema = function._schema.arguments if isinstance(function, torch._ops.OpOverload) else []
    positional = zip((argument.name for argument in schema), args, strict=False)
    for name, value in [*positional, *named.items()]:
        allowed: dict[str, bool] = {
            "layout": value is torch.strided,
            "device": value is Device,
            "dtype": isinstance(value, torch.dtype),
        }
        if value is not None and not allowed.get(name, True):
            raise ValueError(f"the program gives {function} the {name} {value!r}, which is not allowed")


def _lstm(
    steps: torch.Tensor, state: list[torch.Tensor], weights: list[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Runs an LSTM after checking shapes.

    Torch's operator (2.13) does not check them, and reads past the end of tensors that are too small.
    """
    out, hidden = state[0].shape[-1], state[1].shape[-1]
    ways, batch = 2 if bidirectional else 1, steps.shape[0 if batch_first else 1]
    expected: list[tuple[int, ...]] = [(num_layers * ways, batch, size) for size in (out, hidden)]
    for layer in range(num_layers):
        width = steps.shape[-1] if layer == 0 else out * ways
        one_way = [(4 * hidden, width), (4 * hidden, out)] + [(4 * hidden,)] * (2 * has_biases)
        expected += (one_way + [(out, hidden)] * (out != hidden)) * ways
    tensors = [*state, *weights]
    if steps.dim() != 3 or [tuple(tensor.shape) for tensor in tensors] != expected:
        raise ValueError("the saved program has an LSTM whose weights do not fit; save the model again")
    if any(tensor.dtype != steps.dtype for tensor in tensors):
        raise ValueError("an LSTM in the program needs an input of the weights' dtype; cast the input")
    found: tuple[torch.Tensor, ...] = torch.ops.aten.lstm.input(
        steps, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )
    return found


def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Runs an embedding bag after checking its offsets. Torch's operator (2.13) may not check them."""
    if offsets.device.type == "cpu" and offsets.numel():
        ends = torch.cat([offsets, offsets.new_tensor([len(indices)])])
        if ends[0] < 0 or (ends.diff() < 0).any():
            raise ValueError("the offsets of an EmbeddingBag must rise from 0 to the number of values")
    found: tuple[torch.Tensor, ...] = torch.ops.aten.embedding_bag(weight, indices, offsets, *others)
    return found
