"""Every option, and every mistake with one."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from tests.ep.graphs import chain, images
from tests.support import lowbit_library, lowbit_session

PREFIX = "ep.lowbitexecutionprovider."
RIGHT = [
    ("tuning", "off"), ("tuning", "cached"), ("tuning", "on"), ("cuda_graph", "0"), ("cuda_graph", "1"),
    ("deterministic", "0"), ("deterministic", "1"), ("reference", "0"), ("reference", "1"),
    ("device_id", "0"), ("cache_dir", "somewhere"),
]  # fmt: skip
WRONG = [
    ("tuning", "maybe", "option 'tuning' is 'maybe', expected off, cached, on"),
    ("cuda_graph", "2", "option 'cuda_graph' is '2', expected 0, 1"),
    ("deterministic", "", "option 'deterministic' is '', expected 0, 1"),
    ("reference", "yes", "option 'reference' is 'yes', expected 0, 1"),
    ("device_id", "-1", "option 'device_id' is '-1', expected a number"),
    ("device_id", "0x", "option 'device_id' is '0x', expected a number"),
    ("device_id", "1", "option 'device_id' is 1, but the session was given device 0"),
    ("tunning", "off", "option 'tunning' is unknown; there are device_id, tuning, cuda_graph"),
    ("enable_cuda_graph", "1", "regions are CUDA graphs for whatever tensors a run is given"),
]


@pytest.mark.parametrize("device", ["cpu", "fake:0"])
@pytest.mark.parametrize("as_entry", [False, True])
@pytest.mark.parametrize(("key", "value"), RIGHT)
def test_options_are_taken(devices, device: str, as_entry: bool, key: str, value: str) -> None:
    model = chain("conv")
    given = {"entries": {PREFIX + key: value}} if as_entry else {"options": {key: value}}
    x = images(1, 3, 5, 5)
    (y,) = devices.session(model, device, **given).run(None, {"x": x})
    np.testing.assert_array_equal(y, lowbit_session(model).run(None, {"x": x})[0])


@pytest.mark.parametrize("as_entry", [False, True])
@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_wrong_options_are_named(devices, as_entry: bool, key: str, value: str, message: str) -> None:
    if as_entry and not value:
        pytest.skip("ONNX Runtime takes no empty session entry")
    given = {"entries": {PREFIX + key: value}} if as_entry else {"options": {key: value}}
    with pytest.raises(Exception, match=message):
        devices.session(chain("conv"), **given)


def test_the_number_of_the_chosen_device_is_right(devices) -> None:
    devices.session(chain("conv"), "fake:1", options={"device_id": "1"})


def test_one_device_a_session(devices) -> None:
    options = devices.options("fake:0")
    options.add_provider_for_devices([devices.by_name["fake:1"]], {})
    model = chain("conv").SerializeToString()
    with pytest.raises(Exception, match=r"(?i)already"):
        ort.InferenceSession(model, options, enable_fallback=0)


@pytest.mark.parametrize("first", [True, False])
def test_the_custom_ops_may_be_registered_too(devices, first: bool) -> None:

    options = ort.SessionOptions()
    options.log_severity_level = 3
    for step in (first, not first):
        if step:
            options.register_custom_ops_library(lowbit_library())
        else:
            options.add_provider_for_devices([devices.by_name["cpu"]], {})
    session = ort.InferenceSession(chain("conv").SerializeToString(), options, enable_fallback=0)
    assert session.get_providers()[0] == "LowBitExecutionProvider"
