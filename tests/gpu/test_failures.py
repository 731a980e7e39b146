"""What goes wrong says so, and what can go on goes on."""

from __future__ import annotations

import pytest

from tests.gpu.support import gpu_session, in_new_process

LIST_DEVICES = """
from tests.gpu.support import devices
found["devices"] = [dict(d.ep_metadata) for d in devices()]
"""


def test_no_driver_is_a_reason_not_an_error() -> None:
    found = in_new_process(LIST_DEVICES, {"CUDA_VISIBLE_DEVICES": ""})
    (cpu,) = found["devices"]
    assert cpu["device"] == "cpu"
    assert "GPU" in cpu["cuda_unavailable"]


def test_a_missing_cuda_library_is_a_reason_not_an_error() -> None:
    found = in_new_process(LIST_DEVICES, {"LOWBIT_CUDA_LIBRARY": "/no/such/liblowbit_cuda.so"})
    (cpu,) = found["devices"]
    assert cpu["device"] == "cpu"
    assert "/no/such/liblowbit_cuda.so" in cpu["cuda_unavailable"]


LOSE_DEVICE = """
import numpy as np
import onnxruntime as ort
import lowbit
from lowbit.models import build
from tests.gpu.support import NVIDIA, gpu_session
model = lowbit.convert(build("resnet18", 8, 8, image=32, batch="N", classes=10)).model
session = gpu_session(model)
x = np.zeros((1, 3, 32, 32), np.float32)
session.run(None, {"input": x})
name = session.get_outputs()[0].name
try:
    # An address that is nobody's: the kernels that read it fail, and the context with them.
    binding = session.io_binding()
    binding.bind_input("input", "cuda", 0, np.float32, x.shape, 0x10000)
    binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    found["first"] = ""
except Exception as error:
    found["first"] = str(error)
try:
    session.run(None, {"input": x})
    found["second"] = ""
except Exception as error:
    found["second"] = str(error)
"""


def test_a_lost_device_says_what_is_left_to_do() -> None:
    found = in_new_process(LOSE_DEVICE)
    assert "Start the program again" in found["first"] + found["second"], found
    assert found["second"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuning": "sometimes"}, "tuning"),
        ({"no_such_option": "1"}, "no_such_option"),
        ({"cuda_graph": "x"}, "cuda_graph"),
    ],
)
def test_wrong_options_are_named(model, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        gpu_session(model, options)
