"""Real quantized networks: exact, complete, as accurate. They need the evaluation models (LOWBIT_SHARED)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import FULL
from tests.dialects import oracle
from tests.support import FLOAT_MATMULS, interface, lowbit_session, session_options, stock_run

lowbit = pytest.importorskip("lowbit")

MODELS = [
    "mobilenetv2_1.0_224_w8a8_qat",
    "resnet20_cifar10_w8a8u_ortptq",
    "resnet20_cifar10_w4a8_ortptq",
    "resnet8_mlperftiny_w8a8_ortptq",
    "yunet_n_320_w8a8_ortptq",
]
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def _photos(folder: Path, names: list[str]) -> np.ndarray:
    image = pytest.importorskip("PIL.Image", reason="pillow reads the evaluation photos")
    pictures = [
        np.asarray(image.open(folder / "data" / "imagenet_eval200" / n).convert("RGB")) for n in names
    ]
    return np.stack([p[16:240, 16:240] for p in pictures])  # the centre 224 of 256


def evaluation_set(
    folder: Path, model: str, count: int | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Inputs and labels of a model's evaluation set, preprocessed as its provenance says."""
    if model.startswith("resnet"):
        data = np.load(folder / "data" / "cifar10_test_1000.npz")
        x, labels = data["x"][:count], data["y"][:count]
        if "resnet8" in model:
            return x.astype(np.float32), labels
        x = (x.astype(np.float32) / np.float32(255) - _MEAN) / _DEVIATION
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32), labels
    if model.startswith("mobilenet"):
        listed = json.loads((folder / "data" / "imagenet_eval200_labels.json").read_text())
        names = sorted(p.name for p in (folder / "data" / "imagenet_eval200").glob("*.jpg"))[:count]
        labels = np.array([_label(listed, n) for n in names])
        return np.ascontiguousarray(_photos(folder, names).transpose(0, 3, 1, 2)), labels
    faces = np.load(folder / "data" / "yunet_n_320_images.npz")["eval"][:count]
    return np.ascontiguousarray(faces[..., ::-1].transpose(0, 3, 1, 2), np.float32), None


def _label(listed, name: str) -> int:
    return int(listed[name])


def _batches(model: onnx.ModelProto, x: np.ndarray, size: int = 100):
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    size = dim.dim_value or size
    for start in range(0, len(x), size):
        yield {model.graph.input[0].name: x[start : start + size]}


@pytest.fixture(scope="module")
def converted(shared_models):
    """name -> (original, conversion result), each converted once."""
    cache: dict[str, tuple] = {}

    def get(name: str):
        if name not in cache:
            original = onnx.load(shared_models / "qdq" / f"{name}.onnx")
            cache[name] = (original, lowbit.convert(original))
        return cache[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_nothing_stays_in_float(name: str, converted) -> None:
    original, result = converted(name)
    kept = {n.op_type for n in result.model.graph.node}
    assert not kept & FLOAT_MATMULS
    assert interface(result.model) == interface(original)
    # Between the first and the last lowbit node nothing changes the layout.
    inside = [n.domain == "ai.lowbit" for n in result.model.graph.node]
    first, last = inside.index(True), len(inside) - 1 - inside[::-1].index(True)
    between = [n.op_type for n in list(result.model.graph.node)[first : last + 1]]
    if (
        "yunet" not in name
    ):  # its heads are transposed to NHWC by the model itself, each behind its last layer
        assert "Transpose" not in between
    assert "QuantizeLinear" not in between
    assert "DequantizeLinear" not in between


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_graph_as_written(name: str, converted, shared_models) -> None:
    original, result = converted(name)
    x, _ = evaluation_set(shared_models, name, 1 if "mobilenet" in name else 2)
    session = lowbit_session(result.model)
    for feeds in _batches(original, x):
        for ours, meant in zip(session.run(None, feeds), oracle.run(original, feeds), strict=True):
            np.testing.assert_allclose(ours, meant, rtol=1e-6, atol=0)


def _faces(outputs: dict[str, np.ndarray], size: int = 320) -> np.ndarray:
    """Boxes [n, 5] (x1, y1, x2, y2, score): score = sqrt(cls * obj) > 0.6, then NMS at IoU 0.45."""
    found = []
    for stride in (8, 16, 32):
        score = np.sqrt(outputs[f"cls_{stride}"] * outputs[f"obj_{stride}"]).reshape(-1)
        box = outputs[f"bbox_{stride}"].reshape(-1, 4)
        rows, columns = np.divmod(np.arange(len(score)), size // stride)
        centre = (np.stack([columns, rows], 1) + box[:, :2]) * stride
        extent = np.exp(box[:, 2:]) * stride
        all_boxes = np.concatenate([centre - extent / 2, centre + extent / 2, score[:, None]], 1)
        found.append(all_boxes[score > 0.6])
    boxes = np.concatenate(found)
    boxes = boxes[np.argsort(-boxes[:, 4], kind="stable")]
    kept: list[np.ndarray] = []
    for box in boxes:
        if all(_overlap(box, other) <= 0.45 for other in kept):
            kept.append(box)
    return np.array(kept).reshape(-1, 5)


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:4], b[2:4])
    common = float(np.prod(np.maximum(high - low, 0)))
    return common / (float(np.prod(a[2:4] - a[:2])) + float(np.prod(b[2:4] - b[:2])) - common)


def test_yunet_finds_the_same_faces(converted, shared_models) -> None:
    original, result = converted("yunet_n_320_w8a8_ortptq")
    x, _ = evaluation_set(shared_models, "yunet")
    names = [o.name for o in original.graph.output]
    session = lowbit_session(result.model)
    total = 0
    for feeds in _batches(original, x):
        ours = _faces(dict(zip(names, session.run(None, feeds), strict=True)))
        theirs = _faces(dict(zip(names, stock_run(original, feeds), strict=True)))
        assert len(ours) == len(theirs)
        assert all(any(_overlap(a, b) > 0.9 for b in theirs) for a in ours)
        total += len(ours)
    assert total, "no face found in any photo"


@pytest.mark.parametrize("name", [m for m in MODELS if "yunet" not in m])
def test_top_1_over_the_evaluation_set(name: str, converted, shared_models, capsys) -> None:
    """As accurate as stock ONNX Runtime; images whose answer changed are printed and must be near-ties."""
    original, result = converted(name)
    x, labels = evaluation_set(shared_models, name, None if FULL else 40)
    session = lowbit_session(result.model)
    import onnxruntime

    stock = onnxruntime.InferenceSession(
        original.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    answers = []
    for run in (session, stock):
        scores = np.concatenate([run.run(None, feeds)[0] for feeds in _batches(original, x)])
        answers.append(scores.argmax(1) - (1 if scores.shape[1] == 1001 else 0))
    ours, theirs = answers
    changed = np.flatnonzero(ours != theirs)
    with capsys.disabled():
        print(
            f"\n{name}: top-1 {np.mean(ours == labels):.4f}, ONNX Runtime {np.mean(theirs == labels):.4f} "
            f"over {len(labels)} images; changed: {[(int(i), int(theirs[i]), int(ours[i])) for i in changed]}"
        )
    assert len(changed) <= max(1, len(labels) // 50)
    assert abs(np.mean(ours == labels) - np.mean(theirs == labels)) <= 0.01 + 1 / len(labels)
