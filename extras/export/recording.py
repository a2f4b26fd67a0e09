"""Records a network as a `Program` for any number of rows, by `torch.export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ringspark.estimators.names import first_line
from ringspark.extras.inner_columns import keep_outputs
from ringspark.models.operators import ON_SIZES, find_operator
from ringspark.models.outputs import as_outputs
from ringspark.models.process_state import PROCESS_LOCK, silence_thread
from ringspark.models.program import FORMAT_VERSION, Json, NoProgramError, Program, ValueRef, encode

Inputs: TypeAlias = tuple[torch.Tensor, ...]

# The program must reproduce the network's results for these numbers of rows. The trace has two rows, because
# torch would treat a size of 1 as a constant.
TRACED_ROWS = 2
_TRIED_ROWS = (1, 2, 5)
_TOLERANCE = 1e-6

# Checks that would refuse another device than the trace's.
_SKIPPED = {"aten._assert_tensor_metadata.default"}
# Replacements of operators that skip checks or return uninitialized memory.
_INSTEAD = {
    "aten._unsafe_view.default": "aten.reshape.default",
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
_SIZE_NAMES = {function: name for name, function in ON_SIZES.items()}
_CONSTANT = "constant_of_program"


def record_program(
    module: nn.Module,
    samples: Callable[..., Inputs],
    varying: Sequence[Mapping[int, Any]],
    lengths: Sequence[int] = (),
    inner: Sequence[str] = (),
) -> Program:
    """Records a network in eval mode, and checks that the program computes the same on a few rows.

    The program shares the network's weights.

    Args:
        samples: Function that makes example inputs from a number of rows and, if inputs vary in length, a
            length.
        inner: Names of modules whose outputs the program keeps.
        varying: Dynamic dimensions of each input, as for `torch.export`.
        lengths: If inputs are padded to the longest row, the padded lengths for which to compare results.
    """
    try:
        # A trace changes `nn.Module` itself, so the lock also covers `_compare`, which runs the network.
        with PROCESS_LOCK:
            exported = trace_network(module, samples(TRACED_ROWS), varying, inner)
            text, tensors = _text_of(_without_writes(exported), module)
            if inner:  # move the values of inner modules out of the outputs
                count = len(text["outputs"]) - len(inner)
                text["inner"] = dict(zip(inner, text["outputs"][count:], strict=True))
                text["outputs"], text["single"] = text["outputs"][:count], count == 1
            program = Program(text)
            for name, tensor in tensors.items():
                program.put(name, tensor)
            _compare(program, module, samples, lengths)
    except NoProgramError:
        raise
    except Exception as error:  # tracing runs the module's code
        raise NoProgramError(f"{type(error).__name__}: {first_line(error)}") from error
    return program.eval()


def trace_network(
    module: nn.Module, inputs: Inputs, varying: Sequence[Mapping[int, Any]], inner: Sequence[str] = ()
) -> torch.export.ExportedProgram:
    # Hide torch's messages: errors are raised anyway, and the caller checks the result.
    with PROCESS_LOCK, torch.no_grad(), silence_thread():
        # strict is the default of torch 2.6, and cannot trace a class attribute such as `rows`.
        return torch.export.export(
            _Outputs(module, inner).eval(), inputs, dynamic_shapes=(tuple(varying),), strict=False
        )


class _Outputs(nn.Module):
    def __init__(self, module: nn.Module, inner: Sequence[str] = ()) -> None:
        super().__init__()
        self.module, self._inner = module, inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        with keep_outputs(self.module, self._inner) as found:
            outputs = as_outputs(self.module(*inputs))
        outputs += tuple(found[name] for name in self._inner)
        return outputs[0] if len(outputs) == 1 else outputs


def _text_of(
    exported: torch.export.ExportedProgram, module: nn.Module
) -> tuple[Json, dict[str, torch.Tensor]]:
    tensors = dict(module.state_dict(keep_vars=True))
    declared = [
        _declared(name, tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer")
        for name, tensor in tensors.items()
    ]
    # Placeholder of the trace -> tensor of the program.
    sources, users = {}, []
    for spec in exported.graph_signature.input_specs:
        kind, target = spec.kind.name, (spec.target or "").removeprefix("module.")
        if kind == "USER_INPUT":
            users.append(spec.arg.name)
        elif kind == "CONSTANT_TENSOR" or (kind == "BUFFER" and not spec.persistent):
            name = f"{_CONSTANT}_{len(tensors)}"
            tensors[name] = exported.constants[spec.target]
            declared.append(_declared(name, tensors[name], "constant"))
            sources[spec.arg.name] = name
        elif kind in ("PARAMETER", "BUFFER"):
            sources[spec.arg.name] = target
        else:
            raise NoProgramError(f"its constant {target!r} is not a tensor")
    places = {name: index for index, name in enumerate(tensors)}
    entries = {placeholder: ValueRef(places[name]) for placeholder, name in sources.items()}
    entries |= {name: ValueRef(len(tensors) + index) for index, name in enumerate(users)}
    steps, outputs = _steps(exported, entries, len(tensors) + len(users))
    return {
        "format_version": FORMAT_VERSION,
        "torch": str(torch.__version__),
        "num_inputs": len(users),
        "single": len(outputs) == 1,
        "outputs": outputs,
        "tensors": declared,
        "steps": steps,
    }, tensors


def _without_writes(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    targets = [node.target for node in exported.graph.nodes]
    if not any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets):
        return exported
    with PROCESS_LOCK, torch.no_grad(), silence_thread():
        exported = exported.run_decompositions({})
    graph = exported.graph
    for node in list(graph.nodes):
        # torch's decomposition skips the checks of `batch_norm`.
        if str(node.target) == "aten._native_batch_norm_legit_no_training.default":
            *tensors, momentum, epsilon = node.args
            with graph.inserting_before(node):
                checked = graph.call_function(
                    torch.ops.aten.batch_norm.default, (*tensors, False, momentum, epsilon, True)
                )
            for user in list(node.users):
                user.replace_all_uses_with(checked)
                graph.erase_node(user)
            graph.erase_node(node)
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            raise NoProgramError(f"it changes its buffer {spec.target!r} while it predicts")
    return exported


def _declared(name: str, tensor: torch.Tensor, kind: str) -> Json:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "kind": kind}


def _steps(
    exported: torch.export.ExportedProgram, entries: dict[str, ValueRef], next_entry: int
) -> tuple[list[Any], list[Any]]:
    steps: list[Any] = []

    def refer(argument: Any) -> Any:
        entry: Any = lambda node: entries[node.name]  # noqa: E731 (torch's type does not allow a ValueRef)
        return torch.fx.node.map_arg(argument, entry)

    kinds = [spec.kind.name for spec in exported.graph_signature.output_specs]
    for node in exported.graph.nodes:
        if node.op == "output":
            # An input that the network writes into is an output of another kind.
            found = [value for value, kind in zip(node.args[0], kinds, strict=True) if kind == "USER_OUTPUT"]
            outputs = [refer(value) for value in found if value is not None]
            if not all(isinstance(value, ValueRef) for value in outputs):
                raise NoProgramError("it returns something other than a tensor")
            return steps, encode(outputs)
        if node.op == "call_function" and str(node.target) not in _SKIPPED:
            name = _name(node.target)
            arguments = {key: encode(refer(value)) for key, value in node.kwargs.items()}
            steps.append([name, encode(refer(node.args)), arguments])
            entries[node.name] = ValueRef(next_entry)
            next_entry += 1
        elif node.op not in ("placeholder", "call_function"):
            raise NoProgramError(f"it holds an operation that a program cannot hold ({node.name})")
    raise NoProgramError("it has no output")


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = _INSTEAD.get(str(target), str(target))
        try:
            find_operator(name)
        except ValueError:
            raise NoProgramError(f"the operator {name} is not allowed in a program") from None
        return name
    if target in _SIZE_NAMES:
        return _SIZE_NAMES[target]
    raise NoProgramError(f"the operation {target} is not one of torch's own")


def _compare(
    program: Program, module: nn.Module, samples: Callable[..., Inputs], lengths: Sequence[int]
) -> None:
    sizes = [(rows,) for rows in _TRIED_ROWS] + [(TRACED_ROWS, length) for length in lengths]
    for size in sizes:
        zeros = samples(*size)
        with torch.inference_mode():
            for inputs in (tuple(_spread(tensor) for tensor in zeros), zeros):
                try:
                    expected = as_outputs(module(*(tensor.clone() for tensor in inputs)))
                    break
                except Exception:  # 1 may be out of range, and a network may refuse a single row.
                    continue
            else:
                continue
            found = as_outputs(program(*inputs))
        for one, other in zip(found, expected, strict=True):
            if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                shape = " of length ".join(map(str, (f"{size[0]} rows", *size[1:])))
                raise NoProgramError(
                    f"the traced network and the network itself return different results for {shape}"
                )


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Returns test values in the shape of `tensor`.

    Floats run from -1 to 1, and integers are 1. Every third value is 0, as in a mask.
    """
    count = tensor.numel()
    numbers = torch.linspace(-1, 1, count) if tensor.is_floating_point() else torch.ones(count)
    numbers[2::3] = 0
    return numbers.to(tensor.dtype).reshape(tensor.shape)
