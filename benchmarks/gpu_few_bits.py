"""Few bits, and thresholds of QONNX, beside the same networks at 8 bits, on a GPU.

python benchmarks/gpu_few_bits.py                                          on an NVIDIA GPU
python benchmarks/gpu_few_bits.py --device cpu-ep --batches 1 --rounds 1   does everything still run?

ResNets are the seeded ones of `lowbit.models`, in QONNX as `lowbit.export` writes them, and with a
BatchNormalization behind every convolution. CNV is FINN's binary network for CIFAR-10 (--cnv names a QONNX
file that has it), beside a seeded one of the same layers at 8 bits; VGG-small, as papers on binary networks
have it, pads its windows, where bipolar codes have no zero.
Times are device times of a run among many (`gpu_networks.py`), tuned, all of a network in turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lowbit
import numpy as np
import onnx
from gpu_forms import FORMS, CalibrationImages, checked_subject
from gpu_networks import facts_of
from lowbit.models import build, save
from lowbit.models.calibration import images
from lowbit.models.graph import GraphBuilder
from lowbit.sessions.devices import canonical
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_static
from results import RESULTS, WORK, Table, write

BASE = "w8a8"
_VGG = ((128, False), (128, True), (256, False), (256, True), (512, False), (512, True))
_CNV = ((64, False), (64, True), (128, False), (128, True), (256, False), (256, False))
SMALL = {"cnv": (_CNV, (512, 512), 0), "vgg_small": (_VGG, (), 1)}
"""By network: width of the convolutions and whether a pooling follows, of the layers behind, pads."""
SHARED_CNV = Path(__file__).resolve().parents[2] / "shared/models/qonnx/cnv_w1a1_cifar10.onnx"


def with_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """A BatchNormalization behind every Conv, as trained networks in QONNX have them.

    Some gammas are negative. Codes behind one are told by integer thresholds, where those of the Conv alone
    are requantized.
    """
    rng = np.random.default_rng(0)
    makers = {output: node for node in model.graph.node for output in node.output}
    sizes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.append(node)
        if node.op_type != "Conv":
            continue
        y = node.output[0]
        model.graph.node[-1].output[0] = f"{y}_sums"
        weights = node.input[1]
        while weights in makers:  # a quantizer
            weights = makers[weights].input[0]
        count = sizes[weights][0]
        gammas = rng.uniform(0.7, 1.4, count) * np.where(rng.random(count) < 0.03, -1, 1)
        shifts = rng.normal(0, 0.02, (2, count))
        inputs = [f"{y}_sums"]
        for array in (gammas, *shifts, rng.uniform(0.6, 1.5, count)):
            inputs.append(f"{y}_norm_{len(inputs)}")
            model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), inputs[-1]))
        model.graph.node.append(helper.make_node("BatchNormalization", inputs, [y]))
    return model


def seeded(
    network: str, bits: int, *, w_bits: int | None = None, qonnx: bool = False, norms: bool = False
) -> Path:
    """A network of `lowbit.models` with so many bits, of weights `w_bits`, converted, in the work folder."""
    suffix = ("_qonnx" if qonnx else "") + ("_norms" if norms else "")
    path = WORK / f"{network}_w{w_bits or bits}a{bits}{suffix}_few.lowbit.onnx"
    if not path.exists():
        model = build(network, w_bits or bits, bits, batch="N")
        if qonnx:
            model = lowbit.export(lowbit.convert(model).model, to="qonnx").model
        lowbit.convert(with_norms(model) if norms else model, path, overwrite=True)
    return path


def small_network(name: str) -> onnx.ModelProto:
    """The layers of CNV or VGG-small in float32 with random weights."""
    widths, features, pad = SMALL[name]
    builder = GraphBuilder(name, seed=5)
    x, channels, size = "input", 3, 32
    for width, is_pooled in widths:
        x, channels = builder.relu(builder.conv(x, channels, width, 3, pad=pad)), width
        x = builder.max_pool(x, 2, 2) if is_pooled else x
        size = (size - 2 + 2 * pad) // (2 if is_pooled else 1)
    x, channels = builder.flatten(x), channels * size * size
    for width in features:
        x, channels = builder.relu(builder.gemm(x, channels, width)), width
    return builder.finish(builder.gemm(x, channels, 10), ("N", 3, 32, 32), 10)


def of_8_bits(name: str) -> Path:
    """A small network quantized by onnxruntime, converted."""
    path, source, quantized = (WORK / f"{name}{end}" for end in (".lowbit.onnx", ".onnx", "_w8a8.onnx"))
    if path.exists():
        return path
    save(small_network(name), source)
    quantize_static(source, quantized, CalibrationImages("input", 32), **FORMS["A"])
    lowbit.convert(quantized, path, overwrite=True)
    return path


def binary(name: str) -> Path:
    """A small network in QONNX, normalized, with signs for what Relu leaves and for weights, converted.

    Pixels and the first weights have 8 bits.
    """
    path = WORK / f"{name}_w1a1.lowbit.onnx"
    if path.exists():
        return path
    model = with_norms(small_network(name))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    domain = "qonnx.custom_op.general"
    model.opset_import.append(helper.make_opsetid(domain, 1))
    for constant, value in (("one", 1), ("zero", 0), ("eight", 8), ("step", 1 / 64)):
        model.graph.initializer.append(numpy_helper.from_array(np.float32(value), constant))

    def quantized(x: str, is_binary: bool) -> str:
        inputs = [x, "one"] if is_binary else [x, "step", "zero", "eight"]
        attributes = {} if is_binary else {"signed": 1, "narrow": 1, "rounding_mode": "ROUND"}
        op = "BipolarQuant" if is_binary else "Quant"
        model.graph.node.append(helper.make_node(op, inputs, [f"{x}_quant"], domain=domain, **attributes))
        return f"{x}_quant"

    for i, node in enumerate(nodes):
        if node.op_type == "Relu":
            model.graph.node.append(
                helper.make_node("BipolarQuant", [node.input[0], "one"], node.output, domain=domain)
            )
            continue
        if node.op_type in ("Conv", "Gemm"):
            node.input[1] = quantized(node.input[1], i > 0)
        if i == 0:
            node.input[0] = quantized(node.input[0], False)
        model.graph.node.append(node)
    lowbit.convert(model, path, overwrite=True)
    return path


def cnv_of_one_bit(file: Path) -> Path:
    """The QONNX file, its batch left open, converted."""
    model = onnx.load(file)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    del model.graph.value_info[:]
    path = WORK / f"{file.stem}.lowbit.onnx"
    lowbit.convert(model, path, overwrite=True)
    return path


def networks(cnv: Path) -> dict[str, dict[str, Path]]:
    """By network: what is measured in turns, the one of 8 bits first."""
    out = {
        "resnet18": {
            BASE: seeded("resnet18", 8),
            "w4a4": seeded("resnet18", 4),
            "w2a2": seeded("resnet18", 2),
            "w1a2": seeded("resnet18", 2, w_bits=1),
            "w1a1": seeded("resnet18", 1),
            "QONNX w2a2": seeded("resnet18", 2, qonnx=True),
            "QONNX w2a2, normalized": seeded("resnet18", 2, qonnx=True, norms=True),
            "QONNX w4a4, normalized": seeded("resnet18", 4, qonnx=True, norms=True),
        },
        "resnet50": {f"w{bits}a{bits}": seeded("resnet50", bits) for bits in (8, 4, 2)},
        "vgg_small": {BASE: of_8_bits("vgg_small"), "QONNX w1a1, normalized": binary("vgg_small")},
    }
    if cnv.is_file():
        out["cnv"] = {BASE: of_8_bits("cnv"), "QONNX w1a1": cnv_of_one_bit(cnv)}
    else:
        print(f"without CNV: there is no {cnv}")
    return out


def measure(paths: dict[str, Path], batch: int, device: str, rounds: int) -> dict[str, list[float]]:
    """Rounds of microseconds by variant."""
    with tempfile.TemporaryDirectory() as cache:
        subjects = {}
        for variant, path in paths.items():
            given = onnx.load(path, load_external_data=False).graph.input[0]
            feed = {given.name: images(batch, given.type.tensor_type.shape.dim[2].dim_value, seed=3)}
            subjects[variant], _ = checked_subject(path, device, cache, feed)
        out: dict[str, list[float]] = {variant: [] for variant in subjects}
        for _ in range(rounds):
            for variant, subject in subjects.items():
                out[variant].append(subject.queued() * 1e6)
        return out


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,16,128", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 50 ms each (default: 7)")
    parser.add_argument("--cnv", type=Path, default=SHARED_CNV, help="a QONNX file of CNV")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    options = parser.parse_args()
    device = canonical(options.device)
    WORK.mkdir(parents=True, exist_ok=True)
    table = Table("few bits", ["network", "batch", "variant", "us", f"over {BASE}"])
    raw = []
    for batch in map(int, options.batches.split(",")):
        for network, paths in networks(options.cnv).items():
            rounds = measure(paths, batch, device, options.rounds)
            medians = {variant: float(np.median(each)) for variant, each in rounds.items()}
            rows = [[network, batch, v, us, us / medians[BASE]] for v, us in medians.items()]
            table.rows += rows
            raw.append({"network": network, "batch": batch, "us": rounds})
            print(Table(f"{network}, batch {batch}", table.columns, rows).markdown(), flush=True)
    notes = [
        "Device time of a run, of many that are queued; the median of rounds in which all take turns.",
        "Every output of four images is the CPU's.",
    ]
    write(
        "gpu_few_bits",
        "Few bits on a GPU",
        [table],
        notes,
        raw,
        folder=options.out,
        machine=facts_of(device),
        commit=options.commit or None,
    )


if __name__ == "__main__":
    main()
