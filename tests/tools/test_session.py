"""lowbit.session and the library it registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.errors import LowBitError, ModelError
from lowbit.proto.feeds import random_feeds


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
