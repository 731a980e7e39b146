"""lowbit.session and the library it registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis
import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import strategies as st
from lowbit.errors import LowBitError, ModelError
from lowbit.measure.bench import Subject
from lowbit.proto.feeds import random_feeds
from lowbit.sessions import session as module
from lowbit.sessions.session import prepare

from tests.dialects.graphs import CASES
from tests.support import require_native
from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import run

EP, CPU = "LowBitExecutionProvider", "CPUExecutionProvider"


def way(opened) -> str:
    """Which of the two ways on the CPU a session took."""
    return "cpu-ep" if opened.get_providers() == [EP, CPU] else "cpu-ops"


# ---- regions or custom ops


@hypothesis.given(st.sampled_from(sorted(CASES)), st.integers(0, 99), st.integers(1, 3), st.integers(0, 9))
def test_both_ways_on_the_cpu_compute_the_same(name, model_seed, threads, seed):
    require_native()
    built = CASES[name].build(model_seed)
    model = lowbit.convert(built.model).model
    is_lowbit = any(node.domain == "ai.lowbit" for node in model.graph.node)
    sessions = {device: lowbit.session(model, device=device, threads=threads)
                for device in ("cpu", "cpu-ops", *(["cpu-ep"] if is_lowbit else []))}  # fmt: skip
    ways = {"cpu": "cpu-ep" if is_lowbit else "cpu-ops", "cpu-ops": "cpu-ops", "cpu-ep": "cpu-ep"}
    for device, opened in sessions.items():
        assert way(opened) == ways[device]
    for k, sizes in enumerate(built.sizes):
        feed = built.feed(seed + k, **sizes)
        expected = sessions["cpu-ops"].run(None, feed)
        for opened in sessions.values():
            for got, value in zip(opened.run(None, feed), expected, strict=True):
                assert (got.dtype, got.shape) == (value.dtype, value.shape)
                if CASES[name].left or CASES[name].float_tail:
                    np.testing.assert_allclose(got, value, rtol=1e-6, atol=1e-30)
                else:
                    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("threads", [None, 1, 2])
def test_the_cpu_takes_regions_of_every_form_of_a_model(converted, source, threads):
    proto = onnx.load(converted)
    for form in (converted, str(converted), converted.read_bytes(), proto, lowbit.convert(source)):
        assert way(lowbit.session(form, threads=threads)) == "cpu-ep"
        assert way(lowbit.session(form, device="cpu-ops", threads=threads)) == "cpu-ops"


def test_the_cpu_leaves_a_model_without_lowbit_nodes_to_onnxruntime(source):
    for form in (source, source.read_bytes(), onnx.load(source)):
        assert way(lowbit.session(form)) == "cpu-ops"


def _profiling(options, folder):
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")


def _saving(options, folder):
    options.optimized_model_filepath = str(folder / "optimized.onnx")


def _with_custom_ops(options, folder):
    options.register_custom_ops_library(lowbit.get_library_path())


def _with_entry(key):
    return lambda options, folder: options.add_session_config_entry(key, "1")


@pytest.mark.parametrize(
    "ask",
    [
        _profiling, _saving, _with_custom_ops, _with_entry("session.disable_quant_qdq"),
        _with_entry("ep.context_enable"),
    ],
)  # fmt: skip
def test_what_regions_do_not_give_makes_the_cpu_take_custom_ops(converted, tmp_path, ask):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    ask(options, tmp_path)
    opened = lowbit.session(converted, sess_options=options)
    assert way(opened) == "cpu-ops"
    feed = random_feeds(onnx.load(converted))
    np.testing.assert_array_equal(opened.run(None, feed)[0], lowbit.session(converted).run(None, feed)[0])
    if ask is _profiling:
        ops = {node.op_type for node in onnx.load(converted).graph.node}
        events = Path(opened.end_profiling()).read_text(encoding="utf-8")
        assert all(op in events for op in ops)


def test_no_node_on_the_cpu_means_what_it_meant(converted):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    with pytest.raises(ModelError, match="CPU EP"):
        lowbit.session(converted, sess_options=options)
    assert way(lowbit.session(converted, device="cpu-ep", sess_options=options)) == "cpu-ep"


def test_without_plugin_providers_the_cpu_takes_custom_ops(converted, monkeypatch):
    feed = random_feeds(onnx.load(converted))
    expected = lowbit.session(converted).run(None, feed)[0]

    def refuse(name, path):
        raise RuntimeError("this build has no plugin execution providers")

    monkeypatch.setattr(ort, "get_ep_devices", list)
    monkeypatch.setattr(ort, "register_execution_provider_library", refuse)
    opened = lowbit.session(converted)
    assert way(opened) == "cpu-ops"
    np.testing.assert_array_equal(opened.run(None, feed)[0], expected)


def test_options_keep_the_way_that_they_got(converted, source, capfd):
    options = ort.SessionOptions()
    for model in (converted, source, converted):
        assert way(lowbit.session(model, sess_options=options)) == "cpu-ep"
    assert "not converted" not in capfd.readouterr().err
    with pytest.raises(LowBitError, match="set up for device cpu already, got cpu-ops; make new ones"):
        lowbit.session(converted, device="cpu-ops", sess_options=options)
    options = ort.SessionOptions()
    for model in (source, converted):
        assert way(lowbit.session(model, sess_options=options)) == "cpu-ops"


def test_options_of_providers_stay_those_of_their_user(converted):
    options = ort.SessionOptions()
    prepare(options, "cpu-ep", {"reference": True})
    with pytest.raises(LowBitError, match="set up for device cpu-ep"):
        lowbit.session(converted, sess_options=options)


def test_the_cpu_says_nothing_of_nodes_that_stay_with_onnxruntime(capfd):
    require_native()
    model = lowbit.convert(qdq_conv()).model
    model.graph.output[0].name = "z"
    model.graph.node.append(onnx.helper.make_node("Erf", ["y"], ["z"], "erf"))
    opened = lowbit.session(model)
    assert way(opened) == "cpu-ep"
    opened.run(None, random_feeds(model))
    assert not capfd.readouterr().err


def test_commands_go_the_way_of_the_session(converted, source, tmp_path, monkeypatch):
    subject = Subject.read(str(converted), 1, 0, None)
    assert way(subject.open()) == "cpu-ep"
    assert way(subject.open(str(tmp_path / "profile"))) == "cpu-ops", "a profile tells of nodes"
    assert way(Subject.read(str(converted), 1, 0, None, "cpu-ops").open()) == "cpu-ops"
    seen: dict[str, set[str]] = {"cpu": set(), "cpu-ops": set()}
    real = module.open_session

    def spied(model, options, device="cpu", **more):
        opened = real(model, options, device, **more)
        if device in seen and module._mentions_lowbit(model):
            seen[device].add(way(opened))
        return opened

    monkeypatch.setattr(module, "open_session", spied)
    images = tmp_path / "images.npz"
    np.savez(images, **random_feeds(onnx.load(source)))
    for device in seen:
        assert lowbit.verify(converted, source, samples=1, device=device).ok
        lowbit.evaluate(converted, images, against=source, device=device)
        run("run", converted, "--random", "--device", device)
    assert seen == {"cpu": {"cpu-ep"}, "cpu-ops": {"cpu-ops"}}


# ---- opening


def test_every_form_of_a_model_opens(converted, source):
    proto = onnx.load(converted)
    feed = random_feeds(proto)
    forms = [converted, str(converted), converted.read_bytes(), proto, lowbit.convert(source)]
    outputs = [lowbit.session(form).run(None, feed) for form in forms]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output[0], outputs[0][0])


def test_one_set_of_options_serves_many_sessions(converted, source):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.x64quantprecision", "1")
    for model in (converted, converted, source):
        lowbit.session(model, sess_options=options, threads=1)
    assert options.intra_op_num_threads == 2, "the user's setting came back"
    assert options.get_session_config_entry("session.x64quantprecision") == "1"


def test_options_that_hold_the_library_already_work_too(converted):
    options = ort.SessionOptions()
    options.register_custom_ops_library(lowbit.get_library_path())
    lowbit.session(converted, sess_options=options)
    lowbit.session(converted, sess_options=options)


def test_the_library_works_without_the_python_package(converted):
    options = ort.SessionOptions()
    options.register_custom_ops_library(lowbit.get_library_path())
    assert Path(lowbit.get_library_path()).is_absolute()
    session = ort.InferenceSession(str(converted), options, providers=["CPUExecutionProvider"])
    assert isinstance(lowbit.session(converted), type(session))


def test_what_cannot_open_says_why(converted, tmp_path):
    with pytest.raises(LowBitError, match=r"device must be 'cpu', .*got 'tpu'"):
        lowbit.session(converted, device="tpu")
    with pytest.raises(LowBitError, match=r"provider_options \(tuning\).*device 'cpu' runs"):
        lowbit.session(converted, provider_options={"tuning": "on"})
    with pytest.raises(LowBitError, match="threads must be at least 1, got 0"):
        lowbit.session(converted, threads=0)
    with pytest.raises(ModelError, match="no such file"):
        lowbit.session(tmp_path / "missing.onnx")
    with pytest.raises(ModelError, match="refuses"):
        lowbit.session(b"not a model")
    with pytest.raises(LowBitError, match="path, bytes, a ModelProto or a Result, got int"):
        lowbit.session(3)


def test_public_names_are_functions_whatever_was_imported_before():
    code = """
import importlib, pkgutil, types
import lowbit
assert not {module.name for module in pkgutil.iter_modules(lowbit.__path__)} & set(lowbit.__all__)
for home in lowbit._HOME.values():
    importlib.import_module(f"lowbit.{home}")
for name in lowbit.__all__:
    assert not isinstance(getattr(lowbit, name), types.ModuleType), name
assert set(lowbit.__all__) <= set(dir(lowbit))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_light():
    code = "import sys, lowbit; assert not {'onnx', 'onnxruntime', 'numpy'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
