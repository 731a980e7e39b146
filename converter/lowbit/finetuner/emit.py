"""Writes what was trained back into the quantized model: other values, the same nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from lowbit.finetuner.engine import Engine
from lowbit.quantizer.emit import LARGEST_BIAS

Array = npt.NDArray[Any]


def write_back(engine: Engine) -> onnx.ModelProto:
    """The quantized model with the engine's codes, scales and biases.

    What did not change keeps its bytes. Biases are int32 on exactly ``f32(x_scale * w_scale)``.
    """
    network = engine.network
    made = onnx.ModelProto()
    made.CopyFrom(network.model)
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    moved = [bool(growth.any()) for growth in engine.growths]
    grids = [engine.grid_scale(index).detach().cpu().numpy() for index in range(len(network.grids))]
    for index, grid in enumerate(network.grids):
        for name in grid.initializers if moved[index] else ():
            _replace(tensors[name], grids[index])
    for name, layer in network.layers.items():
        state, files = engine.layers[name], layer.files
        x = engine.grid_index(layer)
        if not (moved[x] or state.growth.any() or state.shift.any()) and np.array_equal(
            state.codes.cpu().numpy(), layer.codes
        ):
            continue
        scale = engine.scale(name).detach().cpu().numpy()
        _replace(tensors[files["codes"]], engine.codes(name).detach().cpu().numpy())
        _replace(tensors[files["scale"]], scale)
        if layer.bias:
            unit = engine.bias_unit(name).cpu().numpy()
            bias = engine.bias(name).detach().cpu().numpy().astype(np.float64)
            codes = np.rint(bias / unit).clip(-LARGEST_BIAS, LARGEST_BIAS)
            _replace(tensors[files["bias"]], codes)
            _replace(tensors[files["bias_scale"]], unit)
    return made


def _replace(tensor: onnx.TensorProto, values: Array) -> None:
    """Gives an initializer other values; its name, type and shape stay."""
    shape = tuple(tensor.dims)
    values = np.broadcast_to(values, shape) if values.size == 1 else values.reshape(shape)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.INT2):
        made = helper.make_tensor(tensor.name, tensor.data_type, shape, values.astype(np.int8).reshape(-1))
    else:
        made = numpy_helper.from_array(np.array(values, dtype, order="C"), tensor.name)
    tensor.CopyFrom(made)
