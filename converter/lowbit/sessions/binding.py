"""Inputs and outputs that lie on the device, and the time of runs that are queued there.

The plain API of ONNX Runtime does it all; what is here is the shortest form of it that works with every
release from 1.24 on (``IOBinding.bind_output`` takes no vendor id, OrtValues do).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.sessions.devices import ep_device, has_own_memory

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnxruntime

Memory = tuple[str, int, int]
"""Device type, number and PCI vendor id, as ``onnxruntime.OrtValue`` takes them."""


def memory_of(device: str) -> Memory:
    """Where tensors of a device lie; ``device`` in its full form."""
    if not has_own_memory(device):
        return "cpu", 0, -1
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtDeviceMemoryType

    info = ep_device(device).memory_info(OrtDeviceMemoryType.DEFAULT)
    return "gpu", int(info.device_id), int(info.device_vendor_id)


def bind(
    opened: onnxruntime.InferenceSession, feed: Mapping[str, npt.NDArray[Any]], device: str
) -> onnxruntime.IOBinding:
    """Copies a feed to the device and binds it, and an output buffer of the right size for each output.

    Runs the model once, to learn the sizes.
    """
    from onnxruntime import OrtValue

    where = memory_of(device)
    results = opened.run(None, dict(feed))
    binding = opened.io_binding()
    for name, value in feed.items():
        binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(np.asarray(value, order="C"), *where))
    for output, value in zip(opened.get_outputs(), results, strict=True):
        buffer = OrtValue.ortvalue_from_shape_and_type(value.shape, value.dtype, *where)
        binding.bind_ortvalue_output(output.name, buffer)
    return binding


def queued_seconds(opened: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, runs: int) -> float:
    """Seconds per run of ``runs`` runs that are handed to the device without waiting for it in between.

    On a GPU that is the device's own time, as long as it is longer than handing a run over takes.
    """
    from onnxruntime import RunOptions

    options = RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    # onnxruntime's Python looks this entry up in every run and catches an exception where it is not there,
    # which takes 20 us. -1: no graph capture by ONNX Runtime, which plays no part here.
    options.add_run_config_entry("gpu_graph_id", "-1")
    start = time.perf_counter()
    for _ in range(runs - 1):
        opened.run_with_iobinding(binding, options)
    # onnxruntime 1.24 waits for a device in a plain run alone; synchronize_outputs() does nothing there.
    opened.run_with_iobinding(binding)
    binding.synchronize_outputs()
    return (time.perf_counter() - start) / runs
