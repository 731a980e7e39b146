"""The execution provider on its CPU device and on a fake one.

The fake device (ep/tests/fake_device) stands in liblowbit_cuda's place: host memory that poses as a GPU's,
streams that really run behind the caller's back. Who touches its memory from the host dies; who uses a block
after it was freed, or hands it a host pointer, is counted.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.support import lowbit_library

EP = "LowBitExecutionProvider"
VENDOR = 0xFA4E
ROOT = Path(__file__).resolve().parents[2]


def fake_library() -> Path:
    """The fake device's library; skips where it was not built."""
    named = os.environ.get("LOWBIT_FAKE_DEVICE")
    found = [Path(named)] if named else sorted(ROOT.glob("build*/**/liblowbit_fake_device.so"))
    found = [path for path in found if path.is_file()]
    if not found:
        pytest.skip("the fake device is not built (-DLOWBIT_TESTS=ON); LOWBIT_FAKE_DEVICE may name it")
    return max(found, key=lambda path: path.stat().st_mtime)


def host_program(name: str) -> list[Path]:
    """A program that stands beside the fake device, with the libraries of onnxruntime and lowbit for it."""
    program = fake_library().with_name(name)
    libraries = sorted(Path(ort.__file__).parent.glob("capi/libonnxruntime.so*"))
    if not program.is_file() or not libraries:
        pytest.skip(f"{name} is not built, or the wheel of onnxruntime holds no library of its own")
    return [program, libraries[0], Path(lowbit_library())]


class Devices:
    """The provider's devices, registered under a name of these tests' own."""

    def __init__(self, path: Path) -> None:
        self.seen = ctypes.CDLL(str(path))
        for function in ("BytesInUse", "Blocks", "Faults"):
            getattr(self.seen, f"LowBitFake{function}").restype = ctypes.c_size_t
        os.environ["LOWBIT_CUDA_LIBRARY"] = str(path)
        try:
            ort.register_execution_provider_library("lowbit_tests", lowbit_library())
        finally:
            del os.environ["LOWBIT_CUDA_LIBRARY"]
        # The CPU's factory comes first, so the last CPU device is that of this registration.
        self.by_name = {d.ep_metadata["device"]: d for d in ort.get_ep_devices() if d.ep_name == EP}

    def blocks(self, device: int = 0) -> int:
        return self.seen.LowBitFakeBlocks(device)

    def bytes_in_use(self, device: int = 0) -> int:
        return self.seen.LowBitFakeBytesInUse(device)

    def faults(self) -> int:
        return self.seen.LowBitFakeFaults(0) + self.seen.LowBitFakeFaults(1)

    def lose(self, lost: bool) -> None:
        self.seen.LowBitFakeLose(int(lost))

    def session(
        self,
        model: onnx.ModelProto | str | Path,
        device: str = "fake:0",
        *,
        options: Mapping[str, str] | None = None,
        entries: Mapping[str, str] | None = None,
    ) -> ort.InferenceSession:
        session_options = self.options(device, options, entries)
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
        return ort.InferenceSession(source, session_options, enable_fallback=0)

    def options(
        self, device: str, options: Mapping[str, str] | None = None, entries: Mapping[str, str] | None = None
    ) -> ort.SessionOptions:
        made = ort.SessionOptions()
        made.log_severity_level = 3
        for key, value in (entries or {}).items():
            made.add_session_config_entry(key, value)
        made.add_provider_for_devices([self.by_name[device]], dict(options or {}))
        return made

    def tensor(self, value: np.ndarray, device: int = 0) -> ort.OrtValue:
        """A copy of `value` on the fake device."""
        return ort.OrtValue.ortvalue_from_numpy(value, "gpu", device, VENDOR)


@functools.cache
def registered_devices() -> Devices:
    """The one registration of a process with the fake device.

    ONNX Runtime takes memory of a device from whichever registration of it came first; a second one would be
    handed pointers that it does not know.
    """
    return Devices(fake_library())


@pytest.fixture(scope="session")
def registered() -> Devices:
    return registered_devices()


@pytest.fixture
def devices(registered: Devices) -> Iterator[Devices]:
    """The devices; after the test nothing may have been misused, and no memory be left."""
    gc.collect()
    gc.freeze()  # what lives now is not looked at again: 0.1 s for every collection
    before, faults = registered.blocks(), registered.faults()
    yield registered
    gc.collect()
    assert registered.faults() == faults, "see stderr"
    assert registered.blocks() <= before
