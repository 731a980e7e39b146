"""The same networks in the forms that quantizers write, on a GPU, beside torch in fp16.

python benchmarks/gpu_forms.py --seconds 540                    what must be measured first, then the rest
python benchmarks/gpu_forms.py --prepare                        the converted models of that, without a GPU
python benchmarks/gpu_forms.py --networks resnet50 --forms A,D --batches 1
python benchmarks/gpu_forms.py --device cpu-ep --networks resnet18 --batches 1     does everything still run?

Forms, all but E, F and H of `onnxruntime.quantization.quantize_static`, but in U int8 weights per channel:
- A: uint8 activations, int32 bias; Relu is left to the quantizer.
- B: symmetric int8 activations, int32 bias; Relu stands between two quantizers.
- C: as B with the bias in float.
- D: as C with quantizers in front of layers and of both inputs of an Add, not behind them.
- E: as D, but of an Add's inputs the shortcut alone, as NVIDIA's tools place them.
- F: as D, but in front of layers and pools alone, as ModelOpt quantizes a PyTorch model by default: shortcuts
  and gates stay float32.
- H: F in float16 (`high_precision_dtype="fp16"`): scales, biases, shortcuts; Casts at both ends. It runs with
  `float_precision=float16`.
- U: as A, but uint8 weights with a zero point for each tensor, as older files have them.

Networks are classifiers at 224x224 and YOLO detectors at 640x640, their heads included.

Times are device times of a run among many (`gpu_networks.py`), tuned, forms and torch in turns at each batch;
torch runs the float network in fp16, channels last, in a CUDA graph, with --compile also what torch.compile
makes of it. What was measured stays in a state file, from which a later run of the same commit on the same
device goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lowbit
import numpy as np
import onnx
from gpu_networks import Subject, facts_of, torch
from gpu_rows import State
from lowbit.models import DETECTORS, build, save
from lowbit.models.calibration import images
from lowbit.models.half import in_half
from lowbit.sessions.devices import canonical
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from results import RESULTS, WORK, Table, write

NETWORKS = ("resnet50", "resnet18", "mobilenetv2", "mobilenetv3large", "efficientnetb0", *DETECTORS)
MUST = [
    *(("resnet50", "A,B,C,D,E", batch) for batch in (1, 16, 128)),
    *((network, "A", batch) for network in NETWORKS[3:] for batch in (1, 16)),
]
"""What a first run measures, and before anything else: network, forms, batch."""
_SYMMETRIC = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True}
_LAYERS = ["Conv", "Gemm", "MatMul", "MaxPool", "GlobalAveragePool"]
_PAIR = ("QuantizeLinear", "DequantizeLinear")
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
FORMS["E"] = FORMS["D"]
FORMS["F"] = FORMS["H"] = {**FORMS["D"], "op_types_to_quantize": _LAYERS}
FORMS["U"] = {**FORMS["A"], "weight_type": QuantType.QUInt8, "per_channel": False}
TORCH, COMPILED = "torch fp16", "torch.compile fp16"
OPTIONS: dict[str, dict[str, str]] = {"H": {"float_precision": "float16"}}
"""Of the provider, by form: where the file says float16, shortcuts may lie as that."""
CODES = 1.0
"""Share of the outputs that must be the CPU's."""
NEARLY = 0.98
"""Least correlation of a form's outputs with the CPU's, where options make other numbers than there."""


def size_of(network: str) -> int:
    """Height and width of a network's images."""
    return 640 if network in DETECTORS else 224


class CalibrationImages(CalibrationDataReader):  # type: ignore[misc]
    """Two images for `quantize_static`, as the input of that name."""

    def __init__(self, name: str, size: int) -> None:
        self._feeds: Iterator[Any] = iter([{name: images(1, size, seed=seed)} for seed in (1, 2)])

    def get_next(self) -> dict[str, Any] | None:
        """The next of them."""
        return next(self._feeds, None)


def with_float_branches(model: onnx.ModelProto, *, layers_alone: bool) -> onnx.ModelProto:
    """Form E of a model in form D: an Add reads one input as it is made, without quantizers between.

    It is what the last convolution of a residual block makes, which nothing else reads, not the shortcut; of
    two convolutions the first operand. Form F, `layers_alone`: all but layers and pools read what is made.
    """
    nodes = model.graph.node
    makers = {output: node for node in nodes for output in node.output}
    readers = Counter(name for node in nodes for name in node.input)
    for node in nodes:
        is_float = node.op_type not in (*_LAYERS, *_PAIR) if layers_alone else node.op_type == "Add"
        for i, name in enumerate(node.input if is_float else ()):
            dequantize = makers.get(name)
            if dequantize is None or dequantize.op_type != "DequantizeLinear":
                continue
            quantize = makers.get(dequantize.input[0])
            if quantize is None or quantize.op_type != "QuantizeLinear":
                continue
            if layers_alone:
                node.input[i] = quantize.input[0]
            elif all(readers[each] == 1 for each in (name, quantize.output[0], quantize.input[0])):
                node.input[i] = quantize.input[0]
                break
    while True:
        read = {name for node in nodes for name in node.input} | {each.name for each in model.graph.output}
        unread = [node for node in nodes if not read & set(node.output)]
        if not unread:
            return model
        for node in unread:
            nodes.remove(node)


def converted(network: str, form: str) -> Path:
    """A network in a form, converted, in the work folder."""
    source, path = WORK / f"{network}_float_batch.onnx", WORK / f"{network}_form_{form}.lowbit.onnx"
    WORK.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        save(build(network, batch="N"), source)
    if not path.exists():
        quantized = WORK / f"{network}_form_{form}.onnx"
        name = onnx.load(source).graph.input[0].name
        quantize_static(source, quantized, CalibrationImages(name, size_of(network)), **FORMS[form])
        made = onnx.load(quantized)
        if form in ("E", "F", "H"):
            made = with_float_branches(made, layers_alone=form != "E")
        if form == "H":
            made = in_half(made, ends=False)
        lowbit.convert(made, path, overwrite=True)
    return path


class InTorch:
    """The float network as a function of torch.

    Args:
        model: Nodes of the kinds that `lowbit.models` writes.
        torch: The module.
        device: Where the weights lie.
        dtype: Of the weights.
        channels_last: How weights of convolutions lie.
    """

    def __init__(
        self, model: onnx.ModelProto, torch: Any, device: str, dtype: Any, channels_last: bool = True
    ) -> None:
        self._graph, self._torch = model.graph, torch
        self._values: dict[str, Any] = {}
        given = [(each.name, each) for each in model.graph.initializer]
        for node in model.graph.node:
            if node.op_type == "Constant":
                given.append((node.output[0], helper.get_attribute_value(node.attribute[0])))
        # A captured graph cannot ask a tensor for its numbers.
        scales = {node.input[2] for node in model.graph.node if node.op_type == "Resize"}
        for name, tensor in given:
            array = numpy_helper.to_array(tensor)
            if array.dtype == np.float32 and name not in scales:
                self._values[name] = torch.from_numpy(array.copy()).to(device, dtype)
            else:
                self._values[name] = array.tolist()
        for node in model.graph.node:
            if node.op_type == "Conv" and channels_last:
                weights = self._values[node.input[1]]
                self._values[node.input[1]] = weights.to(memory_format=torch.channels_last)
        # x * sigmoid(x), where nobody else reads the sigmoid, is one kernel of torch.
        readers = Counter(name for node in model.graph.node for name in node.input)
        makers = {node.output[0]: node for node in model.graph.node}
        self._silus = {
            node.output[0]: gate.input[0]
            for node in model.graph.node
            for gate in map(makers.get, node.input)
            if node.op_type == "Mul" and gate is not None and gate.op_type == "Sigmoid"
            and gate.input[0] in node.input and readers[gate.output[0]] == 1
        }  # fmt: skip
        gates = {name for node in model.graph.node if node.output[0] in self._silus for name in node.input}
        self._left_out = gates - set(self._silus.values())

    def __call__(self, x: Any) -> Any:
        """The output for images."""
        values = {**self._values, self._graph.input[0].name: x}
        for node in self._graph.node:
            if node.op_type == "Constant" or node.output[0] in self._left_out:
                continue
            if node.output[0] in self._silus:
                made = self._torch.nn.functional.silu(values[self._silus[node.output[0]]])
            else:
                made = self._compute(node, [values[name] if name else None for name in node.input])
            values.update(zip(node.output, made if isinstance(made, tuple) else [made], strict=True))
        return values[self._graph.output[0].name]

    def _compute(self, node: onnx.NodeProto, inputs: list[Any]) -> Any:
        torch, ours = self._torch, self._torch.nn.functional
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        x = inputs[0]
        if node.op_type in ("Conv", "MaxPool"):
            pads, strides = attributes.get("pads", [0, 0, 0, 0]), attributes.get("strides", [1, 1])
            if pads[:2] != pads[2:]:
                raise SystemExit(f"{node.name}: pads {pads} are not those of torch")
            if node.op_type == "MaxPool":
                return ours.max_pool2d(x, attributes["kernel_shape"], strides, pads[:2])
            return ours.conv2d(*inputs, stride=strides, padding=pads[:2], groups=attributes.get("group", 1))
        if node.op_type == "Slice":
            (start,), (end,), (axis,), *step = inputs[1:]
            assert step in ([], [[1]])
            return x.narrow(axis, start, min(end, x.shape[axis]) - start)
        if node.op_type == "Resize":
            return ours.interpolate(x, scale_factor=inputs[2][2:], mode="nearest")
        simple = {
            "Relu": lambda: torch.relu_(x),
            "Clip": lambda: x.clamp_(0, 6),
            "Sigmoid": lambda: torch.sigmoid(x),
            "HardSwish": lambda: ours.hardswish(x),
            "HardSigmoid": lambda: ours.hardsigmoid(x),  # of alpha 1/6, as it is written here
            "Add": lambda: x + inputs[1],
            "Sub": lambda: x - inputs[1],
            "Mul": lambda: x * inputs[1],
            "Div": lambda: x / inputs[1],
            "MatMul": lambda: x @ inputs[1],
            "Gemm": lambda: ours.linear(x, inputs[1] if attributes.get("transB") else inputs[1].T, inputs[2]),
            "GlobalAveragePool": lambda: x.mean((2, 3), keepdim=True),
            "Flatten": lambda: x.flatten(1),
            "Reshape": lambda: x.reshape(inputs[1]),
            "Transpose": lambda: x.permute(attributes["perm"]),
            "Softmax": lambda: torch.softmax(x, attributes["axis"]),
            "Concat": lambda: torch.cat(inputs, attributes["axis"]),
            "Split": lambda: torch.split(x, inputs[1], attributes["axis"]),
        }
        return simple[node.op_type]()


def compiled(run: InTorch, x: Any) -> Any:
    """What torch.compile makes of a network, traced to torch's own operators: nodes of ONNX cut its graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return torch.compile(make_fx(run)(x))


class TorchSubject:
    """A network of torch in a CUDA graph.

    Args:
        model: As `InTorch` takes it.
        x: Its input, float32.
        dtype: What it computes in: "float16", or "float32".
        channels_last: How tensors lie; otherwise channels come first.
        compiles: Whether torch.compile makes kernels of it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        x: Any,
        dtype: str = "float16",
        channels_last: bool = True,
        compiles: bool = False,
    ) -> None:
        run: Any = InTorch(model, torch, "cuda", getattr(torch, dtype), channels_last)
        x = torch.from_numpy(x).cuda().to(getattr(torch, dtype))
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = True
        with torch.no_grad():
            if compiles:
                run = compiled(run, x)
            self._run = run
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


def checked_subject(
    path: Path, device: str, cache: str, feed: dict[str, Any], more: dict[str, str] | None = None
) -> tuple[Subject, float]:
    """A session that runs what one before it chose by tuning, and the seconds of that.

    Exits where images have other outputs than on the CPU, or others than `more` explains.
    """
    place: Any = SimpleNamespace(path=path)
    start = time.perf_counter()
    Subject(place, device, "on", cache, feed, more)  # tunes
    tuned = time.perf_counter() - start
    subject = Subject(place, device, "cached", cache, feed, more)
    expected = lowbit.session(path).run(None, {name: images[:4] for name, images in feed.items()})[0]
    batch = len(next(iter(feed.values())))
    if more:
        alike = float(np.corrcoef(expected.ravel(), subject.output[:4].ravel())[0, 1])
        if not alike >= NEARLY:
            raise SystemExit(f"{path.name}, batch {batch}: outputs correlate with the CPU's by {alike:.4f}")
        return subject, tuned
    same = float(np.mean(expected == subject.output[:4]))
    if same < CODES:
        raise SystemExit(f"{path.name}, batch {batch}: {same:.4f} of the outputs are the CPU's")
    return subject, tuned


_RUN_ONCE = """
import json, sys, lowbit, numpy as np
path, device, options, *dims = sys.argv[1:]
session = lowbit.session(path, device=device, provider_options=json.loads(options))
session.run(None, {session.get_inputs()[0].name: np.zeros([int(dim) for dim in dims], np.float32)})
"""


def launches(path: Path, device: str, options: dict[str, str], dims: tuple[int, ...]) -> int:
    """Kernels that a run enqueues, by the printed plan; a process reads its variable once."""
    plan = subprocess.run(
        [sys.executable, "-c", _RUN_ONCE, str(path), device, json.dumps(options), *map(str, dims)],
        env={**os.environ, "LOWBIT_PRINT_PLAN": "json"},
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    ).stderr
    lines = [json.loads(line) for line in plan.splitlines() if line.startswith('{"lowbit": "region"')]
    kernels = [step["kernel"] for line in lines for step in line["steps"]]
    return sum(kernel.count(" + ") + 1 for kernel in kernels if not kernel.endswith(" with the last"))


def measure(
    network: str, forms: list[str], batch: int, device: str, rounds: int, compiles: bool
) -> dict[str, Any]:
    """Rounds of microseconds by form, and what else there is to know of each."""
    feed = images(batch, size_of(network), seed=3)
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        subjects: dict[str, Any] = {}
        for form in forms:
            path = converted(network, form)
            name = onnx.load(path, load_external_data=False).graph.input[0].name
            more = OPTIONS.get(form, {})
            subjects[form], tuned = checked_subject(path, device, cache, {name: feed}, more)
            start = time.perf_counter()
            lowbit.session(path, device=device, provider_options=more)
            opened = time.perf_counter() - start
            out[form] = {"opened_ms": opened * 1e3, "tuned_s": tuned, "rounds": []}
            out[form]["launches"] = launches(path, device, {"cache_dir": cache, **more}, feed.shape)
        if torch is not None:
            model = onnx.load(WORK / f"{network}_float_batch.onnx")
            subjects[TORCH] = TorchSubject(model, feed)
            if compiles:
                subjects[COMPILED] = TorchSubject(model, feed, compiles=True)
            out.update({peer: {"rounds": []} for peer in subjects.keys() - out.keys()})
        for _ in range(rounds):
            for form, subject in subjects.items():
                out[form]["rounds"].append(subject.queued() * 1e6)
    return out


def tables(places: dict[str, dict[str, Any]]) -> list[Table]:
    """Times by network and batch, and over those of the fastest form."""
    columns = [
        *(f"{form} us" for form in FORMS),
        f"{TORCH} us",
        f"{COMPILED} us",
        "slowest form / A",
        f"A / {TORCH}",
        "opening A, D ms",
        "launches",
    ]
    table = Table("forms", ["network", "batch", *columns])
    for place in places.values():
        names = place["names"]
        medians = {name: float(np.median(each["rounds"])) for name, each in names.items()}
        forms = [medians[form] for form in FORMS if form in medians]
        cells = [medians.get(form, "-") for form in (*FORMS, TORCH, COMPILED)]
        ratios = ["-" if "A" not in medians else max(forms) / medians["A"]]
        ratios.append("-" if not {"A", TORCH} <= medians.keys() else medians["A"] / medians[TORCH])
        opening = ", ".join(f"{names[form]['opened_ms']:.0f}" for form in ("A", "D") if form in names)
        counts = ", ".join(str(names[form]["launches"]) for form in FORMS if form in names)
        table.rows.append([place["network"], place["batch"], *cells, *ratios, opening, counts])
    return [table]


NOTES = [
    "Device time of a run, of many that are queued; the median of rounds in which all take turns.",
    "Every output of four images is the CPU's; those of form H, whose shortcuts are float16, correlate with "
    f"them by {NEARLY} at least. TensorRT cannot be had on this machine.",
    "Launches: kernels of a run, of each form.",
]


def places(options: argparse.Namespace) -> Iterator[tuple[str, list[str], int]]:
    """What is measured, in order: network, forms, batch."""
    if options.networks is options.forms is options.batches is None:
        for network, forms, batch in MUST:
            yield network, forms.split(","), batch
        if options.prepare:
            return
    for batch in map(int, (options.batches or "1,16,128").split(",")):
        for network in (options.networks or ",".join(NETWORKS)).split(","):
            yield network, (options.forms or ",".join(FORMS)).split(","), batch


def page(state: State, facts: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes what is known so far: a later place may be cut off."""
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


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", help=f"(default: {','.join(NETWORKS)})")
    parser.add_argument("--forms", help=f"(default: {','.join(FORMS)})")
    parser.add_argument("--batches", help="(default: 1,16,128)")
    parser.add_argument("--prepare", action="store_true", help="only write the models that are missing")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 50 ms each (default: 7)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time after which nothing is begun"
    )
    parser.add_argument("--compile", action="store_true", help="beside torch.compile, too (slow to begin)")
    parser.add_argument("--state", type=Path, default=WORK / "gpu_forms.json", help="what was measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if options.prepare:
        for network, forms, _ in places(options):
            for form in forms:
                if time.monotonic() < end:
                    print(converted(network, form), flush=True)
        return
    device = canonical(options.device)
    facts = facts_of(device)
    state = State(options.state, {**facts, "commit": options.commit})
    for network, forms, batch in places(options):
        key = f"{network} {batch}"
        missing = set(forms) - state.places.get(key, {"names": {}})["names"].keys()
        if missing and time.monotonic() < end:
            names = measure(network, forms, batch, device, options.rounds, options.compile)
            state.add(key, {"network": network, "batch": batch, "names": names})
            print(tables({key: state.places[key]})[0].markdown(), flush=True)
            page(state, facts, options)
    page(state, facts, options)


if __name__ == "__main__":
    main()
