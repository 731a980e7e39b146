"""The same networks in the forms that quantizers write, on a GPU, beside torch in fp16.

python benchmarks/gpu_forms.py                                  three networks at batch 1, 16 and 128
python benchmarks/gpu_forms.py --networks resnet50 --forms A,D --batches 1
python benchmarks/gpu_forms.py --seconds 300
python benchmarks/gpu_forms.py --device cpu-ep --networks resnet18 --batches 1     does everything still run?

Forms, all of `onnxruntime.quantization.quantize_static`, int8 weights per channel:
- A: uint8 activations, int32 bias; Relu is left to the quantizer.
- B: symmetric int8 activations, int32 bias; Relu stands between two quantizers.
- C: as B with the bias in float.
- D: as C with quantizers in front of layers and of both inputs of an Add, not behind them.

Times are device times of a run among many (`gpu_networks.py`), tuned, forms and torch in turns at each batch;
torch runs the float network in fp16, channels last, in a CUDA graph. What was measured stays in a state file,
from which a later run of the same commit on the same device goes on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lowbit
import numpy as np
import onnx
from gpu_networks import Subject, facts_of, torch
from gpu_rows import State
from lowbit.models import build, save
from lowbit.models.calibration import images
from lowbit.sessions.devices import canonical
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from results import RESULTS, WORK, Table, write

NETWORKS = ("resnet50", "resnet18", "mobilenetv2")
_SYMMETRIC = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True}
_IN_FRONT = ["Conv", "Gemm", "Add", "Relu", "Clip", "MaxPool", "GlobalAveragePool"]
FORMS: dict[str, dict[str, Any]] = {
    "A": {**_SYMMETRIC, "activation_type": QuantType.QUInt8},
    "B": {**_SYMMETRIC, "extra_options": {"ActivationSymmetric": True}},
    "C": {**_SYMMETRIC, "extra_options": {"ActivationSymmetric": True, "QuantizeBias": False}},
    "D": {
        **_SYMMETRIC,
        "extra_options": {
            "ActivationSymmetric": True,
            "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": _IN_FRONT,
        },
    },
}
TORCH = "torch fp16"
CODES = 1.0
"""Share of the outputs that must be the CPU's."""


class _Images(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self._feeds: Iterator[Any] = iter([{name: images(1, 224, seed=seed)} for seed in (1, 2)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def converted(network: str, form: str) -> Path:
    """A network in a form, converted, in the work folder."""
    source, path = WORK / f"{network}_float_batch.onnx", WORK / f"{network}_form_{form}.lowbit.onnx"
    WORK.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        save(build(network, batch="N"), source)
    if not path.exists():
        quantized = WORK / f"{network}_form_{form}.onnx"
        name = onnx.load(source).graph.input[0].name
        quantize_static(source, quantized, _Images(name), **FORMS[form])
        lowbit.convert(quantized, path, overwrite=True)
    return path


def in_torch(model: onnx.ModelProto) -> Callable[[Any], Any]:
    """The float network as a function of torch, in fp16, channels last."""
    constants = {
        each.name: torch.from_numpy(numpy_helper.to_array(each).copy()).cuda().half()
        for each in model.graph.initializer
        if each.data_type == onnx.TensorProto.FLOAT
    }
    ours = torch.nn.functional

    def compute(node: onnx.NodeProto, inputs: list[Any]) -> Any:
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        pads = attributes.get("pads", [0, 0, 0, 0])
        strides = attributes.get("strides", [1, 1])
        if pads[:2] != pads[2:]:
            raise SystemExit(f"{node.name}: pads {pads} are not those of torch")
        if node.op_type == "Conv":
            return ours.conv2d(*inputs, stride=strides, padding=pads[:2], groups=attributes.get("group", 1))
        if node.op_type == "MaxPool":
            return ours.max_pool2d(inputs[0], attributes["kernel_shape"], strides, pads[:2])
        if node.op_type == "Gemm":
            return ours.linear(inputs[0], inputs[1] if attributes.get("transB") else inputs[1].T, inputs[2])
        simple = {
            "Relu": lambda: torch.relu_(inputs[0]),
            "Clip": lambda: inputs[0].clamp_(0, 6),
            "Add": lambda: inputs[0] + inputs[1],
            "GlobalAveragePool": lambda: inputs[0].mean((2, 3), keepdim=True),
            "Flatten": lambda: inputs[0].flatten(1),
        }
        return simple[node.op_type]()

    def run(x: Any) -> Any:
        values = {**constants, model.graph.input[0].name: x}
        for node in model.graph.node:
            values[node.output[0]] = compute(node, [values[name] for name in node.input if name in values])
        return values[model.graph.output[0].name]

    for node in model.graph.node:
        if node.op_type == "Conv":
            constants[node.input[1]] = constants[node.input[1]].to(memory_format=torch.channels_last)
    return run


class TorchSubject:
    """A network of torch in a CUDA graph."""

    def __init__(self, network: str, batch: int) -> None:
        run = in_torch(onnx.load(WORK / f"{network}_float_batch.onnx"))
        x = torch.from_numpy(images(batch, 224, seed=3)).cuda().half().to(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = True
        with torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    run(x)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.output = run(x)
        self._x = x
        self.runs = 10
        self.runs = max(10, round(0.05 / self.queued()))

    def queued(self) -> float:
        """Seconds of a run among many."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.runs):
            self._graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.runs


def measure(network: str, forms: list[str], batch: int, device: str, rounds: int) -> dict[str, Any]:
    """Rounds of microseconds by form, and what else there is to know of each."""
    feed = images(batch, 224, seed=3)
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        subjects: dict[str, Any] = {}
        for form in forms:
            path = converted(network, form)
            name = onnx.load(path, load_external_data=False).graph.input[0].name
            start = time.perf_counter()
            place: Any = SimpleNamespace(path=path)
            Subject(place, device, "on", cache, {name: feed})  # tunes
            tuned = time.perf_counter() - start
            start = time.perf_counter()
            lowbit.session(path, device=device)
            opened = time.perf_counter() - start
            subjects[form] = Subject(place, device, "cached", cache, {name: feed})
            got = subjects[form].output[:4]
            same = float(np.mean(lowbit.session(path).run(None, {name: feed[:4]})[0] == got))
            if same < CODES:
                raise SystemExit(f"{network} {form}, batch {batch}: {same:.4f} of the outputs are the CPU's")
            out[form] = {"opened_ms": opened * 1e3, "tuned_s": tuned, "rounds": []}
        if torch is not None:
            subjects[TORCH] = TorchSubject(network, batch)
            out[TORCH] = {"rounds": []}
        for _ in range(rounds):
            for form, subject in subjects.items():
                out[form]["rounds"].append(subject.queued() * 1e6)
    return out


def tables(places: dict[str, dict[str, Any]]) -> list[Table]:
    """Times by network and batch, and over those of the fastest form."""
    columns = [
        *(f"{form} us" for form in FORMS),
        f"{TORCH} us",
        "slowest form / A",
        f"A / {TORCH}",
        "opening A, D ms",
    ]
    table = Table("forms", ["network", "batch", *columns])
    for place in places.values():
        names = place["names"]
        medians = {name: float(np.median(each["rounds"])) for name, each in names.items()}
        forms = [medians[form] for form in FORMS if form in medians]
        cells = [medians.get(form, "-") for form in (*FORMS, TORCH)]
        ratios = ["-" if "A" not in medians else max(forms) / medians["A"]]
        ratios.append("-" if not {"A", TORCH} <= medians.keys() else medians["A"] / medians[TORCH])
        opening = ", ".join(f"{names[form]['opened_ms']:.0f}" for form in ("A", "D") if form in names)
        table.rows.append([place["network"], place["batch"], *cells, *ratios, opening])
    return [table]


NOTES = [
    "Device time of a run, of many that are queued; the median of rounds in which all take turns.",
    "Every output of four images is the CPU's. TensorRT cannot be had on this machine.",
]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="(default: %(default)s)")
    parser.add_argument("--forms", default=",".join(FORMS), help="(default: %(default)s)")
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 50 ms each (default: 7)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time after which nothing is begun"
    )
    parser.add_argument("--state", type=Path, default=WORK / "gpu_forms.json", help="what was measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    device = canonical(options.device)
    facts = facts_of(device)
    state = State(options.state, {**facts, "commit": options.commit})
    forms = options.forms.split(",")
    for batch in map(int, options.batches.split(",")):
        for network in options.networks.split(","):
            key = f"{network} {batch}"
            missing = set(forms) - state.places.get(key, {"names": {}})["names"].keys()
            if missing and time.monotonic() < end:
                names = measure(network, forms, batch, device, options.rounds)
                state.add(key, {"network": network, "batch": batch, "names": names})
                print(tables({key: state.places[key]})[0].markdown(), flush=True)
    write(
        "gpu_forms",
        "Forms of quantized models on a GPU",
        tables(state.places),
        NOTES,
        state.places,
        folder=options.out,
        machine=facts,
        commit=options.commit or None,
    )


if __name__ == "__main__":
    main()
