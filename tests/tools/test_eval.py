"""`lowbit eval`: metrics, their intervals, paired comparisons, labels; checked on models of known outputs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.errors import LowBitError, ModelError
from lowbit.evaluation import evaluate as evaluating
from lowbit.evaluation.statistics import bootstrap, mcnemar, paired_difference, wilson
from onnx import TensorProto, helper, numpy_helper

from tests.support import ClusterHere, stock_may_saturate
from tests.tools.test_cli import run, run_json

ROOT = Path(__file__).resolve().parents[2]


def linear(weights, *, batch: int | str = "N", name: str = "y", second: bool = False) -> onnx.ModelProto:
    """x [batch, k] -> x @ weights; with ``second`` x itself is an output, too."""
    k, classes = weights.shape
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, classes])]
    nodes = [helper.make_node("MatMul", ["x", "w"], [name])]
    if second:
        nodes.append(helper.make_node("Identity", ["x"], ["same"]))
        outputs.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, [batch, k]))
    graph = helper.make_graph(
        nodes, "linear", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, k])], outputs,
        [numpy_helper.from_array(np.asarray(weights, np.float32), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


EXACT = linear(np.eye(6))
RNG = np.random.default_rng(0)
SCORES = RNG.standard_normal((50, 6)).astype(np.float32)
LABELS = np.where(RNG.random(50) < 0.7, SCORES.argmax(1), RNG.integers(0, 6, 50))
NOISY = linear(np.eye(6) + 0.2 * RNG.standard_normal((6, 6)))


# ---- numbers


def test_intervals_are_those_of_the_textbooks():
    """Wilson: Brown, Cai, DasGupta (2001); the others by their formulas, computed apart."""
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.16113), abs=1e-5)
    low, high = paired_difference(2, 9, 100)
    centre, half = -7 / 102, 1.959964 * math.sqrt(12 - 49 / 102) / 102
    assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-6)
    assert paired_difference(0, 0, 10)[0] < 0 < paired_difference(0, 0, 10)[1]
    assert mcnemar(2, 9) == pytest.approx(2 * (1 + 11 + 55) / 2048)
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1
    assert mcnemar(0, 5000) == 0
    assert mcnemar(4990, 5010) == pytest.approx(math.erfc(19 / 100 / math.sqrt(2)), abs=1e-3)


def test_a_bootstrap_covers_what_it_should():
    """About 95 of 100 intervals hold the true mean; seeded, so that the count is one number."""
    held = 0
    for seed in range(100):
        drawn = np.random.default_rng(seed).standard_normal((60, 1))
        low, high = bootstrap(drawn, lambda means: means[:, 0])
        held += low < 0 < high
    assert 88 <= held <= 99
    assert all(map(math.isnan, bootstrap(np.ones((1, 1)), lambda means: means[:, 0])))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_top1_and_its_companions(batch):
    report = lowbit.evaluate(
        NOISY, {"x": SCORES}, labels=LABELS, metric=["top1", "top5"], against=EXACT, batch=batch
    )
    assert [result.name for result in report.metrics] == ["top1", "top5", "agreement", "sqnr"]
    (weights,) = (numpy_helper.to_array(init) for init in NOISY.graph.initializer)
    ours = SCORES @ weights
    right, wanted = ours.argmax(1) == LABELS, SCORES.argmax(1) == LABELS
    top1 = report["top1"]
    assert top1.model.value == pytest.approx(right.mean())
    assert top1.against.value == pytest.approx(wanted.mean())
    assert (top1.gained, top1.lost) == ((right & ~wanted).sum(), (wanted & ~right).sum())
    assert top1.difference.value == pytest.approx(right.mean() - wanted.mean())
    assert top1.difference.low < top1.difference.value < top1.difference.high
    assert top1.p_value == mcnemar(top1.gained, top1.lost)
    assert list(top1.changed) == [f"data[{i}]" for i in np.flatnonzero(right != wanted)]
    best = np.argsort(-ours, axis=1, kind="stable")[:, :5]
    assert report["top5"].total == (best == LABELS[:, None]).any(axis=1).sum()
    assert report["agreement"].model.value == pytest.approx((ours.argmax(1) == SCORES.argmax(1)).mean())
    noise = float(((ours - SCORES) ** 2).sum())
    assert report["sqnr"].model.value == pytest.approx(10 * math.log10((SCORES**2).sum() / noise), abs=1e-3)
    assert report["sqnr"].model.low < report["sqnr"].model.value < report["sqnr"].model.high


def test_equal_models_agree_and_have_no_noise():
    report = lowbit.evaluate(EXACT, {"x": SCORES}, against=EXACT, metric=["cosine", "sqnr", "agreement"])
    assert report["cosine"].model.value == pytest.approx(1)
    assert report["sqnr"].model.value == math.inf
    assert report["agreement"].model.value == 1
    assert report["agreement"].model.low < 1
    assert report.to_dict()["metrics"][1]["model"]["value"] is None
    json.dumps(report.to_dict(), allow_nan=False)


def test_of_equal_scores_the_first_is_the_best():
    tied = {"x": np.zeros((6, 6), np.float32)}
    report = lowbit.evaluate(EXACT, tied, labels=list(range(6)), metric=["top1", "top5"])
    assert (report["top1"].total, report["top5"].total) == (1, 5)


def test_models_of_different_batches_and_names_are_compared():
    """A fixed batch of 4 leaves a last one of 2, which is filled up; what fills it up does not count."""
    report = lowbit.evaluate(
        linear(np.eye(6), batch=4, name="z"), {"x": SCORES}, labels=LABELS, against=EXACT, batch=3
    )
    assert report.samples == 50
    assert report["top1"].difference.value == 0
    assert report["agreement"].model.value == 1
    assert report["sqnr"].model.value == math.inf


def test_a_cluster_measures_the_same(monkeypatch):
    """In parts of whole batches, which come back in any order."""
    cluster = ClusterHere()
    monkeypatch.setattr(evaluating, "Cluster", cluster)
    monkeypatch.setattr(evaluating, "_PART", 8)
    given = ({"x": SCORES}, LABELS, NOISY)
    alone, spread = (
        lowbit.evaluate(EXACT, given[0], labels=given[1], against=given[2], batch=3, **more).to_dict()
        for more in ({}, {"cluster": "somewhere:6379"})
    )
    assert len(cluster.called) == math.ceil(50 / 9)
    assert spread["metrics"] == alone["metrics"]
    with pytest.raises(LowBitError, match="share it"):
        evaluating._measure_part(
            dataclasses.replace(cluster.called[0][1], name="other", folder="/nowhere"), (0, 3)
        )


def test_several_outputs():
    both = linear(np.eye(6) * 2, second=True)
    report = lowbit.evaluate(both, {"x": SCORES}, against=linear(np.eye(6), second=True))
    assert [result.name for result in report.metrics] == ["sqnr"], "no class scores to agree on"
    assert report["sqnr"].model.value == pytest.approx(10 * math.log10(2), abs=1e-4)
    chosen = lowbit.evaluate(both, {"x": SCORES}, against=EXACT, output_name="same", metric="sqnr")
    assert chosen["sqnr"].model.value == math.inf
    with pytest.raises(LowBitError, match="--output-name: the outputs are y, same, got 'z'"):
        lowbit.evaluate(both, {"x": SCORES}, labels=LABELS, output_name="z")


def test_values_that_are_no_numbers_are_told():
    broken = SCORES.copy()
    broken[3, 2] = np.nan
    report = lowbit.evaluate(EXACT, {"x": broken}, labels=LABELS)
    assert report.notes == ["output 'y' of the model holds NaN or infinite values, first for data[3]"]


def test_some_samples_are_spread_over_all():
    report = lowbit.evaluate(EXACT, {"x": SCORES}, labels=LABELS, samples=10)
    assert report.samples == 10
    assert report["top1"].total == (SCORES[::5].argmax(1) == LABELS[::5]).sum()


def test_a_function_of_the_user(tmp_path):
    (tmp_path / "own.py").write_text(
        "def margin(outputs): return float(outputs['y'].max() - outputs['y'].min())\n"
        "def right(outputs, label): return int(outputs['y'].argmax()) == label['class']\n"
        "def moved(outputs, reference, name): return {'far': 1.0, 'near': name.endswith('[0]')}\n"
        "def text(outputs): return 'good'\n"
        "def odd(outputs, size): return 0\n"
        "def broken(outputs): return outputs['gone']\n"
        "def sometimes(outputs, name): return {} if name.endswith('[3]') else {'a': 1}\n"
    )

    def measured(function, **more):
        return lowbit.evaluate(NOISY, {"x": SCORES}, metric=f"{tmp_path / 'own.py'}:{function}", **more)

    margin = measured("margin", against=EXACT)["margin"]
    assert margin.unit == "mean"
    assert margin.against.value == pytest.approx(np.ptp(SCORES, axis=1).mean(), rel=1e-5)
    assert margin.difference.value == pytest.approx(margin.model.value - margin.against.value)
    labels = [{"class": int(label)} for label in LABELS]
    right = measured("right", labels=labels)["right"]
    assert right.unit == "share"
    assert right.model.value == lowbit.evaluate(NOISY, {"x": SCORES}, labels=LABELS)["top1"].model.value
    moved = measured("moved", against=EXACT)
    assert (moved["far"].total, moved["near"].total, moved["near"].against) == (50, 1, None)
    for function, message in {
        "text": r"data\[0\]: --metric .*:text: expected a bool, a number or a dict of them, returned text",
        "odd": r"expected a function of outputs and, as it needs them, .* found \(outputs, size\)",
        "broken": r"data\[0\]: --metric .*:broken failed: KeyError: 'gone'",
        "sometimes": r"expected a value 'a' for each of the 50 samples, found 49",
    }.items():
        with pytest.raises(LowBitError, match=message):
            measured(function)
    with pytest.raises(LowBitError, match="moved compares with a model; give --against"):
        measured("moved")


# ---- labels


@pytest.fixture
def pictures(tmp_path):
    """Six images of 2 x 2 pixels, two in each of three folders; the model sees their sums of colors."""
    image = pytest.importorskip("PIL.Image")
    for i in range(6):
        folder = tmp_path / "data" / "abc"[i // 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((2, 2, 3), np.uint8)
        pixels[:, :, i // 2] = 10
        image.fromarray(pixels).save(folder / f"{i}.png")
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)], "sums",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(np.array([2, 3]), "axes")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "sums.onnx")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "l.json",
            '{"0.png": 0, "1.png": 0, "b/2.png": 1, "3.png": 1, "data/c/4.png": 2, "5.png": 2, "z": 9}',
        ),
        ("l.json", "[0, 0, 1, 1, 2, 2]"),
        ("l.txt", "0\n0\n1\n1\n2\n2\n"),
        ("l.csv", "name,label\n0.png,0\n1.png,0\n2.png,1\n3.png,1\n4.png,2\n5.png,2\n"),
        ("l.txt", "a/0.png 0\na/1.png 0\nb/2.png 1\nb/3.png 1\nc/4.png 2\nc/5.png 2\n"),
        ("folders", None),
    ],
)
def test_labels_come_in_many_forms(pictures, name, text):
    labels = name
    if text is not None:
        labels = pictures / name
        labels.write_text(text)
    arguments = ["eval", pictures / "sums.onnx", "--data", pictures / "data", "--preprocess", "raw"]
    report = run_json(*arguments, "--labels", labels)
    assert report["metrics"][0]["model"]["value"] == 1
    some = run_json(*arguments, "--labels", labels, "-n", "2", "--batch", "2")
    assert some["metrics"][0]["total"] == some["samples"] == 2


def test_labels_of_an_archive(tmp_path):
    np.savez(tmp_path / "a.npz", x=SCORES, y=LABELS, idx=np.arange(50), shifted=LABELS - 1)
    onnx.save(EXACT, tmp_path / "m.onnx")
    arguments = ["eval", tmp_path / "m.onnx", "--data", tmp_path / "a.npz", "--labels"]
    known = run_json(*arguments, tmp_path / "a.npz")["metrics"][0]["total"]
    assert known == (SCORES.argmax(1) == LABELS).sum()
    assert run_json(*arguments, f"{tmp_path / 'a.npz'}:y")["metrics"][0]["total"] == known
    shifted = run_json(*arguments, f"{tmp_path / 'a.npz'}:shifted", "--label-offset", "1")
    assert shifted["metrics"][0]["total"] == known


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "l.json",
            '{"0.png": 0}',
            r"l\.json: has no label for .*1\.png; .* among the 1 there, such as '0\.png'",
        ),
        ("l.json", "[0, 1]", "expected a label for each of the 6 samples, found 2"),
        ("l.json", "3", "expected an object or a list of labels, found a int"),
        ("l.json", "{", "expected JSON"),
        ("l.txt", "0 1 2\n", "expected a label a line, or a name and a label, found lines of 3 words"),
        ("l.txt", "cat\n" * 6, r"0\.png: expected the number of a class as its label, found 'cat'"),
        ("l.txt", "0\n0\n1\n1\n2\n3\n", r"5\.png: expected a label from 0 to 2, .* found 3; --label-offset"),
        ("l.npy", "0", "expected a vector of labels in an .npy or .npz"),
        ("gone.json", None, "gone.json: cannot be read as labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(pictures, name, text, message):
    if text is not None:
        (pictures / name).write_text(text)
    with pytest.raises(LowBitError, match=message):
        lowbit.evaluate(pictures / "sums.onnx", pictures / "data", labels=pictures / name, preprocess="raw")


# ---- what cannot be measured, and the command


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, r"nothing to measure by: give labels \(--labels\), a model to compare with \(--against\)"),
        ({"metric": "top1"}, "top1 needs the right answers; give --labels FILE"),
        ({"metric": "sqnr"}, "sqnr compares with a model; give --against MODEL"),
        (
            {"metric": "top3"},
            "'top3' is unknown; expected top1, top5, cosine, sqnr, agreement, or module:fun",
        ),
        ({"labels": LABELS, "samples": 0}, "at least 1, got 0"),
        ({"labels": LABELS, "batch": 0}, "the batch must be at least 1, got 0"),
        ({"labels": LABELS, "device": "tpu"}, "device must be"),
        ({"against": linear(np.ones((6, 5))), "metric": "sqnr"}, r"holds \[6\] a sample, \[5\] in the model"),
        (
            {"against": linear(np.ones((3, 6))), "metric": "sqnr"},
            r"expected a sample \[3\] for input 'x', fo",
        ),
    ],
)
def test_what_cannot_be_measured_says_why(more, message):
    with pytest.raises(LowBitError, match=message):
        lowbit.evaluate(EXACT, {"x": SCORES}, **more)


def test_a_converted_model_is_evaluated_on_every_cpu_device(source, converted):
    (value,) = onnx.load(source).graph.input
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    data = {value.name: np.random.default_rng(0).random((20, *shape[1:])).astype(np.float32)}
    for device in ("cpu", "cpu-ep"):
        report = lowbit.evaluate(converted, data, against=source, device=device, threads=1)
        assert report["agreement"].total == 20
        assert report["sqnr"].model.value > 20


def test_the_table_and_the_remarks(tmp_path):
    for model, name in ((NOISY, "noisy"), (EXACT, "exact")):
        onnx.save(model, tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "a.npz", x=SCORES, y=LABELS)
    arguments = [
        "eval",
        tmp_path / "noisy.onnx",
        "--data",
        tmp_path / "a.npz",
        "--labels",
        tmp_path / "a.npz",
    ]
    alone = run(*arguments)
    assert "against" not in alone.stdout
    both = run(*arguments, "--against", tmp_path / "exact.onnx", "-v")
    assert "50 samples" in both.stdout
    assert " lost" in both.stdout
    assert re.search(r"top1 +\d+\.\d\d % .* [+-]\d+\.\d\d pt +[+-]\d+\.\d\d pt \.\. [+-]", both.stdout)
    same = run(*arguments, "--against", tmp_path / "noisy.onnx", "--metric", "sqnr")
    assert re.search(r"sqnr +exact +exact \.\. exact", same.stdout)
    assert f"{tmp_path / 'a.npz'}[" in both.stdout, "-v names what changed"
    assert "Wilson, Agresti-Min, bootstrap; p: McNemar's exact test" in both.stderr
    assert run(*arguments, "-q").stderr == ""
    (line,) = run(*arguments, "--metric", "cosine", code=2).stderr.splitlines()
    assert line == "lowbit: --metric cosine compares with a model; give --against MODEL"


def of_one_node(op_type: str, kind: onnx.TypeProto | None = None, **attributes) -> onnx.ModelProto:
    """x [N, 6] -> a node; its output is a float tensor unless another type is given."""
    kind = kind or helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x"], ["y"], **attributes)], "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])],
        [helper.make_value_info("y", kind)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_outputs_that_cannot_be_told_apart_by_sample():
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    sequence = of_one_node("SequenceConstruct", helper.make_sequence_type_proto(tensor))
    with pytest.raises(LowBitError, match="output 'y' is no tensor, which cannot be evaluated"):
        lowbit.evaluate(sequence, {"x": SCORES}, labels=LABELS)
    whole = of_one_node("ReduceMean", keepdims=0)
    with pytest.raises(LowBitError, match=r"shape \[\] for a batch of 2, which cannot .* \(--batch 1\)"):
        lowbit.evaluate(whole, {"x": SCORES}, against=whole, metric="sqnr", batch=2)
    alone = lowbit.evaluate(whole, {"x": SCORES}, against=whole, metric="sqnr", batch=1)
    assert alone["sqnr"].model.value == math.inf


def test_a_class_for_the_background_is_told():
    images = linear(np.eye(6, 1001))
    (note,) = lowbit.evaluate(images, {"x": SCORES}, labels=LABELS).notes
    assert "--label-offset 1" in note
    assert not lowbit.evaluate(images, {"x": SCORES}, labels=LABELS, label_offset=1).notes


def test_a_model_that_cannot_run_is_told(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        lowbit.evaluate(tmp_path / "gone.onnx", {"x": SCORES}, labels=LABELS)


# ---- real networks


def test_the_accuracies_of_real_networks(shared_models):
    """Against the manifest, from whole evaluation sets, through the same options as a user gives."""
    for model, data, labels, spec, expected in [
        ("fp32/resnet8_mlperftiny.onnx", "cifar10_test_1000.npz", "cifar10_test_1000.npz", "raw", 0.763),
        ("fp32/mnist_cnn.onnx", "mnist_t10k_1000.npz", "mnist_t10k_1000.npz", "raw", 0.99),
        ("fp32/squeezenet1.1.onnx", "imagenet_eval200", "imagenet_eval200_labels.json", "imagenet", 0.545),
    ]:
        folder = shared_models / "data"
        report = lowbit.evaluate(
            shared_models / model, folder / data, labels=folder / labels, preprocess=spec, threads=1
        )
        assert report["top1"].model.value == pytest.approx(expected), model


def test_faces_kept_and_added(shared_models):
    """The example's metric; the float model finds 141 faces, as its provenance says."""
    report = lowbit.evaluate(
        shared_models / "qdq/yunet_n_320_w8a8_ortptq.onnx",
        f"{shared_models}/data/yunet_n_320_images.npz:eval",
        preprocess="order=bgr",
        metric=f"{ROOT / 'examples/face_metric.py'}:faces",
        against=shared_models / "det/yunet_n_320.onnx",
        threads=1,
    )
    assert report["kept"].total + report["lost"].total == 141
    if not stock_may_saturate():
        assert report["kept"].total >= 139
        assert report["added"].total <= 2
