"""Devices: their names, registration, what cannot be used and why, and what is opened on them.

ONNX Runtime's side is played here; tests/ep and tests/gpu hold the execution provider itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import lowbit
import onnx
import onnxruntime as ort
import pytest
from lowbit.errors import LowBitError, ModelError
from lowbit.proto.feeds import shapes_of_batches
from lowbit.sessions.devices import canonical, ep_device, register_ep
from lowbit.sessions.placement import reasons_and_kernels
from lowbit.sessions.session import for_device, open_session, prepare
from onnx import TensorProto, helper

from tests.ep.test_sessions import within
from tests.tools.conftest import qdq_conv

NAME = "LowBitExecutionProvider"


def offered(device: str, **metadata: str) -> SimpleNamespace:
    """An OrtEpDevice as Python sees it."""
    facts = {"device": device, "description": f"a {device}", **metadata}
    return SimpleNamespace(ep_name=NAME, ep_metadata=facts)


class Runtime:
    """The part of onnxruntime that knows execution providers."""

    def __init__(self, *there: SimpleNamespace, version: str = "1.31.1") -> None:
        self.there, self.version, self.registered = there, version, []
        self.refusal: Exception | None = None

    def register(self, name: str, path: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert not self.registered, "registering a name twice is an error of ONNX Runtime's"
        self.registered.append((name, path))

    def devices(self) -> list[SimpleNamespace]:
        stock = SimpleNamespace(ep_name="CPUExecutionProvider", ep_metadata={})
        return [stock, *(self.there if self.registered else ())]


@pytest.fixture
def runtime(monkeypatch):
    """Makes a Runtime take the place of onnxruntime's functions."""

    def play(*there: SimpleNamespace, version: str = "1.31.1") -> Runtime:
        played = Runtime(*there, version=version)
        monkeypatch.setattr(ort, "register_execution_provider_library", played.register)
        monkeypatch.setattr(ort, "get_ep_devices", played.devices)
        monkeypatch.setattr(ort, "__version__", version)
        return played

    return play


class Options(SimpleNamespace):
    """SessionOptions that take devices which are none."""

    def __init__(self) -> None:
        super().__init__(entries={}, added=[], libraries=[])

    def register_custom_ops_library(self, path: str) -> None:
        self.libraries.append(path)

    def add_provider_for_devices(self, found, options) -> None:
        self.added.append((found, dict(options)))

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        if key not in self.entries:
            raise RuntimeError(f"SessionOptions does not have configuration with key: {key}")
        return self.entries[key]


# ---- names


def test_names_have_one_full_form():
    assert [canonical(name) for name in ("cpu", "cpu-ep", "cpu-ops", "cuda", "cuda:0", "cuda:12")] == [
        "cpu", "cpu-ep", "cpu-ops", "cuda:0", "cuda:0", "cuda:12",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1 ", "cuda:9e4", 0])
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(LowBitError, match=r"'cpu', 'cpu-ep', 'cpu-ops', 'cuda' or 'cuda:N'.*lowbit sys"):
        canonical(name)


def test_packaging_guidance():
    assert lowbit.get_ep_name() == NAME
    assert lowbit.get_ep_names() == [NAME]


# ---- registration


def test_the_library_is_registered_once_by_its_absolute_path(runtime):
    played = runtime(offered("cpu"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: register_ep(), range(32)))
    assert played.registered == [(NAME, lowbit.get_library_path())]


def test_a_library_that_others_registered_is_not_registered_again(runtime):
    played = runtime(offered("cpu"))
    played.register("a name of the program's own", "/somewhere")
    register_ep()
    assert len(played.registered) == 1


def test_an_old_onnxruntime_says_which_one_is_needed(runtime):
    played = runtime(version="1.23.2")
    with pytest.raises(LowBitError, match=r"needs onnxruntime 1\.24 or newer, this is 1\.23\.2"):
        register_ep()
    assert not played.registered


def test_what_onnxruntime_says_about_the_library_is_passed_on(runtime):
    runtime().refusal = RuntimeError("undefined symbol:\n CreateEpFactories")
    with pytest.raises(LowBitError, match=r"does not take.*undefined symbol: CreateEpFactories"):
        register_ep()


# ---- what there is


def test_devices_tell_what_can_be_used(runtime):
    runtime(offered("cpu"), offered("cuda:0"), offered("cuda:1"))
    found = {device.name: device for device in lowbit.devices()}
    assert list(found) == ["cpu", "cpu-ops", "cpu-ep", "cuda:0", "cuda:1"]
    assert not [device for device in found.values() if device.reason]
    assert found["cuda:1"].description == "a cuda:1"


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ([offered("cpu", cuda_unavailable="the driver 470.1 is too old")], "driver 470.1 is too old"),
        ([offered("cpu", cuda_unavailable="lowbit: no cuda device can be used: no driver")], "no driver"),
        ([offered("cpu")], "LOWBIT_CUDA_LIBRARY"),
        ([offered("cpu"), offered("cuda:0", cuda_unavailable="cuda:1 is sm_61")], "cuda:1 is sm_61"),
    ],
)
def test_a_missing_gpu_has_its_reason(runtime, there, reason):
    runtime(*there)
    assert reason in lowbit.devices()[-1].reason
    with pytest.raises(LowBitError, match=f"device 'cuda:1': .*{reason}"):
        ep_device("cuda:1")


def test_a_gpu_number_that_is_too_high_names_the_others(runtime):
    runtime(offered("cpu"), offered("cuda:0"), offered("cuda:1"))
    with pytest.raises(LowBitError, match=r"device 'cuda:7': there is cuda:0, cuda:1$"):
        ep_device("cuda:7")
    assert ep_device("cuda:1").ep_metadata["device"] == "cuda:1"


@pytest.mark.parametrize("name", ["gpu:0", "cpu:0", "cpu-ep:1"])
def test_what_no_device_is_called_is_no_missing_gpu(runtime, name):
    runtime(offered("cpu", cuda_unavailable="no driver"))
    with pytest.raises(LowBitError, match="'cpu-ep', 'cpu-ops', 'cuda' or 'cuda:N'.*got '" + name):
        ep_device(canonical(name))


def test_devices_never_raise(runtime):
    runtime(version="1.20.0")
    found = lowbit.devices()
    assert [device.name for device in found] == ["cpu", "cpu-ops", "cpu-ep", "cuda"]
    assert [device.reason is None for device in found] == [True, True, False, False]
    assert "1.24" in found[2].reason


# ---- session options


def test_options_get_the_device_once(runtime):
    runtime(offered("cpu"), offered("cuda:0"))
    options = Options()
    for _ in range(3):
        prepare(options, "cuda:0", {"tuning": "off", "cuda_graph": False, "device_id": 3})
    assert [(found[0].ep_metadata["device"], given) for found, given in options.added] == [
        ("cuda:0", {"tuning": "off", "cuda_graph": "0", "device_id": "3"})
    ]
    assert not options.libraries, "the execution provider brings the custom ops"
    with pytest.raises(LowBitError, match=r"set up for device cuda:0.*got cpu-ep"):
        prepare(options, "cpu-ep", None)
    with pytest.raises(LowBitError, match=r"set up for device cuda:0.*got cpu;"):
        prepare(options, "cpu", None)
    with pytest.raises(LowBitError, match="make new ones"):
        prepare(options, "cuda:0", {"tuning": "on"})


def test_options_stay_as_they_were_when_the_device_is_missing(runtime):
    runtime(offered("cpu"))
    options = Options()
    with pytest.raises(LowBitError):
        prepare(options, "cuda:0", None)
    assert not options.added
    assert not options.entries


def test_a_failing_device_never_falls_back_silently(converted, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise RuntimeError("out of device memory")

    monkeypatch.setattr(ort.capi._pybind_state, "InferenceSession", refuse)
    with pytest.raises(ModelError, match="out of device memory"):
        open_session(converted, ort.SessionOptions(), "cuda:0")
    assert "Falling back" not in capsys.readouterr().out


# ---- what is opened


def float_model() -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "floats", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def lowbit_ops(model) -> int:
    return sum(node.domain == "ai.lowbit" for node in model.graph.node)


def test_quantized_models_are_converted_in_memory(source):
    for form in (source, str(source), source.read_bytes(), onnx.load(source), qdq_conv()):
        assert lowbit_ops(for_device(form).model), type(form)


def test_a_path_with_external_data_keeps_working(tmp_path):
    model = qdq_conv()
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
    assert (tmp_path / "weights.bin").stat().st_size
    assert lowbit_ops(for_device(path).model)


def test_converted_and_compiled_models_open_as_they_are(converted, source, tmp_path):
    compiled = float_model()
    compiled.graph.node[0].op_type, compiled.graph.node[0].domain = "EPContext", "com.microsoft"
    result = lowbit.convert(source)
    ort_file = tmp_path / "model.ort"
    forms = [converted, str(converted), converted.read_bytes(), result, result.model, compiled, ort_file]
    forms.append(within("If", result.model))
    for form in forms:
        assert for_device(form) is form


def test_what_cannot_run_on_a_device_says_so():
    with pytest.warns(RuntimeWarning, match="nothing in this model is quantized; it runs on the CPU"):
        assert lowbit_ops(for_device(float_model())) == 0
    with pytest.warns(RuntimeWarning, match="could be converted: its weights are not constant"):
        assert lowbit_ops(for_device(qdq_conv(weight_is_input=True)).model) == 0


def test_float_models_are_no_surprise_where_the_device_runs_them(recwarn):
    for model in (float_model(), qdq_conv(weight_is_input=True)):
        assert lowbit_ops(getattr(for_device(model, floats=True), "model", model)) == 0
    assert not recwarn.list


def test_damaged_models_are_model_errors(tmp_path):
    path = tmp_path / "damaged.onnx"
    path.write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"damaged\.onnx"):
        for_device(path)
    assert for_device(b"nonsense") == b"nonsense"  # ONNX Runtime says what is wrong with it


# ---- batches, and what the log says


def test_batches_replace_the_first_dim():
    model = qdq_conv(dynamic=True)
    assert shapes_of_batches(model, [1, 16], {"x": [4, 3, 9, 7]}) == [
        {"x": [1, 3, 9, 7]},
        {"x": [16, 3, 9, 7]},
    ]
    assert shapes_of_batches(model, [], {"x": [4, 3, 9, 7]}) == [{"x": [4, 3, 9, 7]}]
    with pytest.raises(LowBitError, match="--shape x=D0"):
        shapes_of_batches(model, [2])
    with pytest.raises(LowBitError, match="batch is fixed"):
        shapes_of_batches(qdq_conv(), [2])
    with pytest.raises(LowBitError, match="at least 1, got 0"):
        shapes_of_batches(model, [4, 0])


def test_what_is_printed_as_json_is_read_among_other_lines():
    printed = (
        "2026-01-01 [W:onnxruntime:, graph.cc:40 Log] lowbit: node 'x' (Y) stays with ONNX Runtime: no\n"
        '{"lowbit": "left", "name": "conv (1)/x", "op": "LowBitConv", "reason": "y is int32"}\n'
        '{"lowbit": "node", "name": "cpu", "op": "LowBitConv", "kernel": "igemm", "measured": false}\n'
        '{"lowbit": "region", "workspace_bytes": 64, "steps": ['
        '{"nodes": ["a", "b"], "kernel": "wgmma, split 2", "from": ["external 0"], "to": "workspace 0"}, '
        '{"nodes": [], "kernel": "copy", "from": ["workspace 0"], "to": "external 1"}]}\n'
        '{"other": "json"}\n'
    )
    reasons, kernels = reasons_and_kernels(printed)
    assert reasons == {"conv (1)/x": "y is int32"}
    assert kernels == {"a": "wgmma, split 2"}
