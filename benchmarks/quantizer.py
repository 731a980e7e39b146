"""Accuracy of `lowbit quantize` on trained networks, beside ONNX Runtime's own quantizer.

python benchmarks/quantizer.py resnet20 resnet8     some networks; none: all of them
python benchmarks/quantizer.py resnet8 --bits w4a4,w2a4 --ablate --draws 3
python benchmarks/quantizer.py --all --jobs 16      everything that the tables have, 16 cases side by side
python benchmarks/quantizer.py --memory             time and memory of large networks, on one thread
python benchmarks/quantizer.py --write              the tables of all cases measured so far

Counted is what the converted integer model says about the whole evaluation set. Calibration images are never
evaluated, evaluation images never calibrate and choose nothing. Every case runs in a process of its own with
one thread, for its memory, and its result is kept in build/benchmarks/quantizer, so that a run can go on
another day; a case whose settings or network changed is measured again. The table names the commit that each
row was measured at. LOWBIT_SHARED names the folder of models and data.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from lowbit.inspection.sysinfo import sysinfo
from lowbit.models import build, save
from lowbit.proto.atomic import write_atomically
from lowbit.proto.feeds import model_inputs
from lowbit.proto.images import load_feeds
from lowbit.quantizer.config import RULES
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from results import RESULTS, ROOT, WORK, Table, commit_here, write

Array = npt.NDArray[Any]
Feed = dict[str, Array]

SHARED = Path(os.environ.get("LOWBIT_SHARED", ROOT.parent / "shared" / "models"))
CASES = WORK / "quantizer"
IMAGENET = "scale=1/255,mean=0.485;0.456;0.406,std=0.229;0.224;0.225"


@dataclass(frozen=True)
class Network:
    """A trained network and its data.

    Attributes:
        file: the float model.
        calib: calibration data, as the command takes them.
        eval: evaluation data.
        preprocess: of both.
        bits: what is measured by default.
        offset: added to the labels.
        fp32: accuracy of the float model.
        must: the marks set before, by bits.
        images: that calibrate.
    """

    file: str
    calib: str
    eval: str
    preprocess: str
    bits: tuple[str, ...]
    fp32: float
    must: dict[str, float]
    images: int = 40
    offset: int = 0


NETWORKS = {
    "resnet20": Network(
        "fp32/resnet20_cifar10.onnx", "data/cifar10_calib_100.npz:x", "data/cifar10_test_1000.npz:x",
        IMAGENET,
        ("w8a8", "w4a8", "w4a4", "w3a8", "w2a8", "w2a4"), 0.835,
        {"w8a8": 0.832, "w4a8": 0.827, "w4a4": 0.802, "w3a8": 0.822, "w2a8": 0.775, "w2a4": 0.760}, 100,
    ),
    "resnet8": Network(
        "fp32/resnet8_mlperftiny.onnx", "data/cifar10_calib_100.npz:x", "data/cifar10_test_1000.npz:x", "raw",
        ("w8a8", "w4a8", "w4a4", "w3a8", "w2a8", "w2a4"), 0.763,
        {"w8a8": 0.755, "w4a8": 0.750, "w4a4": 0.738, "w3a8": 0.735, "w2a8": 0.690, "w2a4": 0.665}, 100,
    ),
    "squeezenet": Network(
        "fp32/squeezenet1.1.onnx", "data/imagenet_calib40", "data/imagenet_eval200", f"crop=224,{IMAGENET}",
        ("w8a8", "w4a8", "w4a4", "w3a8", "w2a8"), 0.545,
        {"w8a8": 0.540, "w4a8": 0.520, "w4a4": 0.415, "w3a8": 0.490, "w2a8": 0.210},
    ),
    "mobilenetv2": Network(
        "fp32/mobilenetv2_1.0_224.onnx", "data/imagenet_calib40", "data/imagenet_eval200", "raw,crop=224",
        ("w8a8", "w4a8", "w4a4"), 0.875, {"w8a8": 0.855, "w4a8": 0.805, "w4a4": 0.605}, offset=1,
    ),
    "mnist": Network(
        "fp32/mnist_cnn.onnx", "data/mnist_t10k_1000.npz:x", "data/mnist_t10k_1000.npz:x", "raw",
        ("w8a8", "w4a8", "w4a4", "w3a8", "w2a4", "w2a2"), 0.990,
        {"w8a8": 0.987, "w4a8": 0.985, "w4a4": 0.985, "w3a8": 0.982, "w2a4": 0.980, "w2a2": 0.980}, 100,
    ),
    "yunet": Network(
        "det/yunet_n_320.onnx", "data/yunet_n_320_images.npz:calib", "data/yunet_n_320_images.npz:eval",
        "order=bgr", ("w8a8", "w4a8", "w4a4"), 141, {"w8a8": 140, "w4a8": 137, "w4a4": 134}, 3,
    ),
}  # fmt: skip
"""The networks, in the order of the table."""

ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""The environment of a process that measures."""

SLOWEST_FIRST = ("mobilenetv2", "squeezenet", "resnet20", "resnet8", "yunet", "mnist")
"""So that no long case is left alone at the end."""


@dataclass(frozen=True)
class Case:
    """One quantization.

    Attributes:
        network: key of NETWORKS.
        bits: such as w4a8.
        tool: lowbit or onnxruntime.
        settings: of `lowbit.quantize`.
        images: so many calibration images, evenly spread; None: all. 0: random values.
        draw: which draw of calibration images, of half of them; 0: no draw.
    """

    network: str
    bits: str
    tool: str = "lowbit"
    settings: tuple[tuple[str, Any], ...] = ()
    images: int | None = None
    draw: int = 0

    @classmethod
    def read(cls, given: dict[str, Any]) -> Case:
        """A case as JSON holds it, with lists for tuples."""
        settings = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in given["settings"])
        return cls(**{**given, "settings": settings})

    def path(self) -> Path:
        """Where its result lies."""
        text = json.dumps([self.network, self.bits, self.tool, self.settings, self.images, self.draw])
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        return CASES / f"{self.network}_{self.bits}_{self.tool}_{key}.json"


def calibration(case: Case, model: onnx.ModelProto) -> list[Feed]:
    """The calibration images of a case, as the model reads them."""
    network = NETWORKS[case.network]
    if case.images == 0:
        rng = np.random.default_rng(case.draw)
        shapes = {name: [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
                  for name, value in model_inputs(model).items()}  # fmt: skip
        return [
            {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            for _ in range(32)
        ]
    feeds = feeds_of(model, network.calib, network.preprocess)
    if case.network == "mnist":
        feeds = feeds[: network.images]
    if case.draw:
        order = np.random.default_rng(case.draw).permutation(len(feeds))
        feeds = [feeds[i] for i in sorted(order[: len(feeds) // 2])]
    if case.images:
        feeds = [feeds[i * len(feeds) // case.images] for i in range(case.images)]
    return feeds


def feeds_of(model: onnx.ModelProto, data: str, preprocess: str) -> list[Feed]:
    """All samples of some data, one by one."""
    batches = load_feeds(str(SHARED / data), model_inputs(model), preprocess)
    return [{name: array[:1] for name, array in batch.items()} for batch in batches]


def labels(network: str) -> Array:
    """The right answers of an evaluation set."""
    if network in ("squeezenet", "mobilenetv2"):
        files = sorted((SHARED / NETWORKS[network].eval).glob("*.jpg"))
        return np.array([int(file.name[:3]) for file in files]) + NETWORKS[network].offset
    stored = np.load(SHARED / NETWORKS[network].eval.rpartition(":")[0])["y"]
    return np.asarray(stored[NETWORKS[network].images :] if network == "mnist" else stored)


def evaluate(case: Case, float_model: onnx.ModelProto, session: ort.InferenceSession) -> dict[str, Any]:
    """Top-1 over the whole evaluation set; of YuNet, faces kept and added."""
    network = NETWORKS[case.network]
    feeds = feeds_of(float_model, network.eval, network.preprocess)
    feeds = feeds[network.images :] if case.network == "mnist" else feeds
    reference = ort.InferenceSession(float_model.SerializeToString(), options())
    names = [output.name for output in session.get_outputs()]
    if case.network == "yunet":
        metric = face_metric()
        total = {"kept": 0, "lost": 0, "added": 0}
        for feed in feeds:
            ours, theirs = (dict(zip(names, s.run(names, feed), strict=True)) for s in (session, reference))
            squeezed = [{name: value[0] for name, value in values.items()} for values in (ours, theirs)]
            for key, count in metric(*squeezed).items():
                total[key] += count
        return {"score": total["kept"], **total}
    answers = labels(case.network)
    right, same, signal, noise = 0, 0, 0.0, 0.0
    for feed, answer in zip(feeds, answers, strict=True):
        ours, theirs = (np.ravel(s.run(names, feed)[0]) for s in (session, reference))
        right += int(ours.argmax() == answer)
        same += int(ours.argmax() == theirs.argmax())
        signal += float(np.square(theirs, dtype=np.float64).sum())
        noise += float(np.square(ours - theirs, dtype=np.float64).sum())
    count = len(answers)
    return {
        "score": right / count,
        "agreement": same / count,
        "sqnr": 10 * float(np.log10(signal / noise)) if noise else None,
        "count": count,
    }


def face_metric() -> Callable[..., dict[str, int]]:
    """The example's metric of faces kept and added."""
    spec = importlib.util.spec_from_file_location("face_metric", ROOT / "examples" / "face_metric.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., dict[str, int]] = module.faces
    return found


def options() -> ort.SessionOptions:
    """One thread, no log."""
    made = ort.SessionOptions()
    made.intra_op_num_threads = 1
    made.log_severity_level = 4
    # Exact sums on machines without VNNI, too.
    made.add_session_config_entry("session.x64quantprecision", "1")
    return made


def run_lowbit(case: Case, path: Path, feeds: list[Feed]) -> dict[str, Any]:
    """Quantizes, converts and evaluates; stock ONNX Runtime runs the QDQ model beside it."""
    model = onnx.load(path)
    start, cpu = time.perf_counter(), time.process_time()
    result = lowbit.quantize(
        path, iter(feeds), bits=case.bits, convert_to=True, threads=1, **dict(case.settings)
    )
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "weight_bytes": sum(layer.bytes for layer in result.report.layers),
        "float_bytes": sum(layer.float_bytes for layer in result.report.layers),
        "widths": sorted({f"w{layer.weight_bits}a{layer.input_bits}" for layer in result.report.layers}),
        "kept_float": len(result.report.kept_float),
        "calibration_sqnr": result.report.outputs,
        "rules": sorted(
            {"asymmetric", "feedback", "bias", "mirror"}  # which decide without a note
            | {decision.rule for decision in result.report.decisions}
        ),
    }
    assert result.converted is not None
    found |= evaluate(case, model, lowbit.session(result.converted, threads=1))
    if not case.settings and not case.draw and case.images is None:
        try:
            stock = ort.InferenceSession(result.model.SerializeToString(), options())
            found["qdq_score"] = evaluate(case, model, stock)["score"]
        except Exception as error:  # what stock ONNX Runtime cannot run is a result, too
            found["qdq_error"] = str(error).splitlines()[0][:200]
    return found


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._feeds, None)


def run_onnxruntime(case: Case, path: Path, feeds: list[Feed]) -> dict[str, Any]:
    """ONNX Runtime's own quantizer on the same images: per channel, its preprocessing, its defaults else."""
    weights = {8: QuantType.QInt8, 4: QuantType.QInt4}[int(case.bits[1])]
    activations = {8: QuantType.QUInt8, 4: QuantType.QUInt4}[int(case.bits[3])]
    with tempfile.TemporaryDirectory() as folder:
        prepared, target = Path(folder) / "prepared.onnx", Path(folder) / "quantized.onnx"
        start, cpu = time.perf_counter(), time.process_time()
        quant_pre_process(str(path), str(prepared))
        quantize_static(
            str(prepared), str(target), _Reader(feeds), quant_format=QuantFormat.QDQ, per_channel=True,
            weight_type=weights, activation_type=activations,
        )  # fmt: skip
        found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        session = ort.InferenceSession(str(target), options())
    return found | evaluate(case, onnx.load(path), session)


def run_case(case: Case) -> dict[str, Any]:
    """A case, in this process."""
    path = SHARED / NETWORKS[case.network].file
    feeds = calibration(case, onnx.load(path))
    run = run_lowbit if case.tool == "lowbit" else run_onnxruntime
    try:
        return run(case, path, feeds)
    except Exception as error:  # a peer that fails is a result, too
        if case.tool == "lowbit":
            raise
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def keep(found: dict[str, Any], path: Path) -> None:
    """Writes what was measured, whole or not at all: a run that is interrupted goes on from such files."""

    def write_found(to: Path) -> None:
        to.write_text(json.dumps(found, indent=1), encoding="utf-8")

    write_atomically(path, write_found, overwrite=True)


def this_machine() -> str:
    """Its processor and cores, and what they run."""
    facts = sysinfo()["machine"]
    return f"{facts['cpu']}, {facts['cores']} cores, onnxruntime {ort.__version__}"


def in_process(case: Case, commit: str) -> dict[str, Any] | None:
    """A case in a process of its own, or what an earlier one found; None, and a line, where it fails."""
    path = case.path()
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8"))["found"])
    given = json.dumps(case.__dict__)
    command = [sys.executable, str(Path(__file__).resolve()), "--case", given, "--result", str(path)]
    command += ["--commit", commit]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True)
    name = f"{case.network} {case.bits} {case.tool} {dict(case.settings)} {case.images} {case.draw}"
    if done.returncode:
        print(f"{name} fails: {(done.stderr.splitlines() or ['no word'])[-1]}", flush=True)
        return None
    found = dict(json.loads(path.read_text(encoding="utf-8"))["found"])
    shown = {key: found[key] for key in ("score", "agreement", "sqnr", "cpu_seconds") if key in found}
    print(name, shown or found, flush=True)
    return found


COSTS = {
    ("mobilenetv2", 40): "300 s, 1500 MB",
    ("mobilenetv2 random", 40): "",
    ("mobilenetv2 random", 400): "at most 1.1 times the memory of 40",
    ("resnet50", 40): "900 s",
    ("vgg16", 40): "6000 MB",
}
"""Network and images -> the most that `lowbit quantize --bits w4a8` may take, times on two cores. Measured is
one thread, whose CPU time bounds that, whatever else the machine does. ResNet-50 and VGG-16 have seeded
weights; memory does not depend on what images show."""


def measure_cost(name: str, images: int, commit: str) -> None:
    """The command in a process of its own, unless an earlier run did that."""
    path = CASES / "costs" / f"{name.replace(' ', '_')}_{images}.json"
    if path.exists():
        return
    network, _, kind = name.partition(" ")
    data = NETWORKS.get(network, NETWORKS["squeezenet"])
    model = SHARED / data.file if network in NETWORKS else WORK / f"{network}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        save(build(network, batch="N"), model)
    calib = ["--calib", kind] if kind else ["--calib", SHARED / data.calib, "--preprocess", data.preprocess]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lowbit", "quantize", model, "-o", f"{folder}/made.onnx",
                   "--bits", "w4a8", *calib, "--samples", str(images), "--threads", "1", "-q"]  # fmt: skip
        start = time.perf_counter()
        process = subprocess.Popen(command, env=ONE_THREAD, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{name}: quantize failed")
    found = {
        "network": name, "images": images, "commit": commit, "machine": this_machine(),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024,
    }  # fmt: skip
    keep(found, path)
    print(found, flush=True)


def cost_table() -> tuple[Table, list[dict[str, Any]]]:
    """Time and memory, as far as measured."""
    table = Table(
        "Time and memory of `lowbit quantize --bits w4a8`, one thread",
        ["network", "images", "CPU s", "MB", "asked, at most", "commit"],
    )
    known = {(row["network"], row["images"]): row for row in on_page() if "images" in row}
    for path in (CASES / "costs").glob("*.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        known[row["network"], row["images"]] = row
    rows = [known[key] for key in COSTS if key in known]
    for row in rows:
        table.rows.append([
            row["network"], row["images"], f"{row['cpu_seconds']:.0f}", f"{row['peak_bytes'] / 1e6:.0f}",
            COSTS[row["network"], row["images"]], row["commit"],
        ])  # fmt: skip
    return table, rows


def measure(names: list[str], args: argparse.Namespace) -> bool:
    """Runs all cases that are asked for, so many side by side; whether none failed.

    A network's rules are turned off one by one where they decided something: elsewhere the file is the same.
    """
    CASES.mkdir(parents=True, exist_ok=True)
    commit = args.commit or commit_here()
    whole, more = [], []
    for name in sorted(names, key=SLOWEST_FIRST.index):
        for bits in args.bits.split(",") if args.bits else NETWORKS[name].bits:
            whole.append(Case(name, bits))
            if args.peer and bits in ("w8a8", "w4a8", "w4a4"):
                more.append(Case(name, bits, "onnxruntime"))
            more += [Case(name, bits, draw=draw) for draw in range(1, args.draws + 1)]
            more += [
                Case(name, bits, images=count)
                for count in (int(word) for word in args.images.split(",") if word)
                if count < NETWORKS[name].images
            ]
    fine = True
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(in_process, case, commit): case for case in (*whole, *more)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                case, found = running.pop(future), future.result()
                fine &= found is not None
                if args.ablate and found is not None and case == Case(case.network, case.bits):
                    settings = [("disable_rules", (rule,)) for rule in RULES if rule in found["rules"]]
                    running |= {
                        pool.submit(in_process, other, commit): other
                        for setting in (*settings, ("rounding", "nearest"))
                        for other in [Case(case.network, case.bits, settings=(setting,))]
                    }
    return fine


def all_found() -> list[tuple[Case, dict[str, Any]]]:
    """Every case that has been measured, here or, as the page has it, elsewhere."""
    read = [entry for entry in on_page() if "case" in entry]
    for path in sorted(CASES.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        where = {key: entry[key] for key in ("commit", "machine")}
        read.append({"case": entry["case"], "found": entry["found"] | where})
    known = {}
    for entry in read:
        known[Case.read(entry["case"])] = entry["found"]
    return list(known.items())


def on_page() -> list[dict[str, Any]]:
    """What the results hold that were written last."""
    path = RESULTS / "quantizer.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["raw"]) if path.exists() else []


def score(network: str, found: dict[str, Any] | None) -> str:
    """A cell of the table."""
    if found is None:
        return ""
    if "error" in found:
        return "fails"
    return f"{found['kept']} / {found['added']}" if network == "yunet" else f"{found['score']:.3f}"


def variant(case: Case) -> tuple[tuple[int, int], str]:
    """What a case is tried with beside the whole: its place among the rows of a table, and words."""
    for key, value in case.settings:
        if key == "disable_rules":
            return (0, list(RULES).index(value[0])), f"without `{value[0]}`"
        return (1, 0), f"{key} to {value}"
    if case.draw:
        return (4, case.draw), f"half of the images, draw {case.draw}"
    if not case.images:
        return (3, 0), "random values"
    return (2, -case.images), f"{case.images} image{'s' if case.images > 1 else ''}"


def difference(network: str, other: dict[str, Any], whole: dict[str, Any]) -> str:
    """A cell of what a variant changes."""
    if network == "yunet":
        return f"{other['kept'] - whole['kept']:+d} / {other['added'] - whole['added']:+d}"
    return f"{other['score'] - whole['score']:+.3f}"


def tables(found: list[tuple[Case, dict[str, Any]]]) -> list[Table]:
    """What a reader wants to see."""
    known = dict(found)
    main = Table(
        "Top-1 of the converted integer model, whole evaluation sets (YuNet: faces kept of 141 / added)",
        ["network", "fp32", "bits", "lowbit", "asked", "QDQ in stock ONNX Runtime", "its own quantizer",
         "agreement", "logit SQNR", "CPU s", "MB", "commit"],
    )  # fmt: skip
    for name, network in NETWORKS.items():
        for bits in network.bits:
            ours = known.get(Case(name, bits))
            if ours is None:
                continue
            peer = known.get(Case(name, bits, "onnxruntime"))
            stock = ours.get("qdq_score", "fails")
            main.rows.append([
                name, network.fp32, bits, score(name, ours), network.must[bits],
                stock if isinstance(stock, str) else f"{stock:.3f}" if name != "yunet" else str(stock),
                score(name, peer), f"{ours['agreement']:.3f}" if "agreement" in ours else "",
                f"{ours['sqnr']:.1f} dB" if ours.get("sqnr") else "", f"{ours['cpu_seconds']:.0f}",
                f"{ours['peak_bytes'] / 1e6:.0f}", ours["commit"],
            ])  # fmt: skip
    made = [main]
    for name, network in NETWORKS.items():
        wholes = {bits: known[Case(name, bits)] for bits in network.bits if Case(name, bits) in known}
        table = Table(
            f"{name} without a rule, or with other data: less what the first row says", ["variant", *wholes]
        )
        table.rows.append(["as it is", *(score(name, whole) for whole in wholes.values())])
        rows: dict[tuple[tuple[int, int], str], dict[str, str]] = {}
        for case, values in found:
            whole = wholes.get(case.bits)
            if (case.network, case.tool) != (name, "lowbit") or whole is None or values is whole:
                continue
            # Another state of the quantizer is no variant of this one.
            if values["commit"] == whole["commit"]:
                rows.setdefault(variant(case), {})[case.bits] = difference(name, values, whole)
        for (_, words), cells in sorted(rows.items()):
            table.rows.append([words, *(cells.get(bits, "") for bits in wholes)])
        if len(table.rows) > 1:
            made.append(table)
    spread = Table(
        "Draws of half of the calibration images", ["network", "bits", "draws", "mean", "lowest", "highest"]
    )
    drawn: dict[tuple[str, str], list[float]] = {}
    for case, values in found:
        if case.tool == "lowbit" and case.draw and not case.settings and case.images is None:
            drawn.setdefault((case.network, case.bits), []).append(values["score"])
    for (name, bits), scores in sorted(drawn.items()):
        spread.rows.append([
            name, bits, len(scores), f"{np.mean(scores):.3f}", f"{min(scores):.3f}", f"{max(scores):.3f}"
        ])  # fmt: skip
    return [*made, *([spread] if spread.rows else [])]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", choices=[[], *NETWORKS], help="default: all")
    parser.add_argument("--bits", default="", help="such as w4a8,w4a4 (default: those of the table)")
    parser.add_argument("--peer", action="store_true", help="ONNX Runtime's own quantizer, too")
    parser.add_argument("--ablate", action="store_true", help="each case without each rule, too")
    parser.add_argument("--draws", type=int, default=0, help="so many draws of half of the images, too")
    parser.add_argument("--images", default="", help="with so many calibration images, too, such as 0,1,10")
    parser.add_argument("--memory", action="store_true", help="time and memory of large networks alone")
    parser.add_argument("--all", action="store_true", help="--peer --ablate --draws 3 --images 0,1,10,40")
    parser.add_argument("--jobs", type=int, default=1, help="so many cases side by side, one thread each")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--write", action="store_true", help="write the tables of all cases so far")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        given = json.loads(args.case)
        found = {"commit": args.commit, "machine": this_machine(), "found": run_case(Case.read(given))}
        keep({"case": given, **found}, Path(args.result))
        return
    for name, count in COSTS if args.memory else ():
        measure_cost(name, count, args.commit or commit_here())
    if args.all:
        args.peer, args.ablate, args.draws, args.images = True, True, 3, "0,1,10,40"
    only_other = (args.write or args.memory) and not args.all
    names = args.networks or ([] if only_other else list(NETWORKS))
    fine = measure(names, args)
    found = all_found()
    notes = [
        "Quantized with `lowbit quantize` at its defaults, converted, and run as lowbit's integer nodes. 40 "
        "ImageNet, 100 CIFAR, 100 MNIST and 3 face images calibrate; 200, 1000, 900 and 7 others are "
        "evaluated: one image is .005, .001 or .001.",
        "asked: the mark set before, at least. Its own quantizer: quantize_static of "
        "onnxruntime.quantization, per channel, after quant_pre_process, on the same images; `fails`: the "
        "tool stops, or its result does not load.",
        "Nothing is drawn at random in networks of this size: other seeds give the same files; what varies "
        "is the images.",
        "CPU s and MB: one process with one thread, quantization and conversion; the peak of that process.",
        "Rules depend on each other: without `unsigned` tensors behind a ReLU are signed, and the rule "
        "`trunk` gives signed ones 8 bits where activations have fewer.",
    ]
    raw = [{"case": case.__dict__, "found": values} for case, values in found]
    costs, measured = cost_table()
    for table, rows in (("cases", [values for _, values in found]), ("time and memory", measured)):
        count = Counter(row["machine"] for row in rows).most_common()
        if count:
            notes.append(f"{table} measured on: {'; '.join(f'{name} ({n})' for name, n in count)}.")
    every = [*tables(found), *([costs] if costs.rows else [])]
    title = "Accuracy of post-training quantization"
    write("quantizer", title, every, notes, raw + measured, commit=args.commit)
    sys.exit(0 if fine else "some cases failed: the same command tries them again")


if __name__ == "__main__":
    main()
