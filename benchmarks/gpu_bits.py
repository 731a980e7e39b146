"""Products of few bits beside those of bytes on a GPU: shapes of the APNN-TC paper, layers of ResNet-50.

python benchmarks/gpu_bits.py                                            on an NVIDIA GPU
python benchmarks/gpu_bits.py --device cpu-ep --rounds 1 --only @7       does it still run?

Times are those of `gpu_layers.py`: a session holds equal nodes that read one input, tuned; all pairs of a
layer take turns. LOWBIT_CUDA_WITHOUT=bits says what the pairs take on the kernels of bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import lowbit
import numpy as np
import onnx
from gpu_layers import COPIES, Subject, Variant, conv, floats, medians, model_of
from gpu_networks import facts_of
from layers import LAYERS, Layer, Pair, Problem
from lowbit.sessions.devices import canonical
from onnx import TensorProto
from results import RESULTS, Table, write

SIZES = tuple(range(128, 1025, 128))
ROWS_OF_APMM = 64
PAIRS = ("w8a8", "w1a1u", "w1a2", "w2a2", "w1a4")


def few_codes(problem: Problem, x: str, y: str) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Codes of as many bits as the input's."""
    node, constants = conv(problem, x, y)
    return [node], constants


FORMS = {
    "codes": Variant("codes", few_codes),
    "float32": Variant("float32", floats, output=TensorProto.FLOAT),
    "in a row": Variant("in a row", few_codes, in_row=True),
}


def measure(layer: Layer, batch: int, form: str, device: str, rounds: int) -> dict[str, float]:
    """Median microseconds by pair. Every output is the CPU's."""
    with tempfile.TemporaryDirectory() as cache:
        subjects = {}
        for text in PAIRS:
            variant = replace(FORMS[form], name=text, bits=text)
            pair = Pair.parse(text)
            sizes = (batch, layer.height, layer.width, layer.in_channels)
            x = np.random.default_rng(2).integers(0, 2**pair.x_bits, sizes, np.uint8)
            subjects[text] = Subject(layer, variant, x, device, cache)
            expected = lowbit.session(model_of(layer, variant), device="cpu").run(None, {"x": x})[0]
            if not np.array_equal(subjects[text].output, expected):
                raise SystemExit(f"{layer.name}, batch {batch}, {text}: not what the CPU computes")
        return medians(subjects, rounds)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,16", help="of ResNet-50's layers (default: 1,16)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 20 ms a pair (default: 7)")
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    parser.add_argument("--groups", default="", help="only tables whose name contains this")
    parser.add_argument("--name", default="gpu_bits", help="name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    device = canonical(options.device)
    networks = json.loads(LAYERS.read_text(encoding="utf-8"))["networks"]
    resnet = [Layer(*fields) for fields in networks["resnet50_v1"]]
    products = [Layer(n, 1, 1, n, 1, 1, 0, 1, 1) for n in SIZES]
    groups: dict[str, tuple[int, str, list[Layer]]] = {
        f"APMM: {ROWS_OF_APMM} rows": (ROWS_OF_APMM, "codes", products),
        f"APMM: {ROWS_OF_APMM} rows, float32 out": (ROWS_OF_APMM, "float32", products),
        f"APMM: {ROWS_OF_APMM} rows, in a row": (ROWS_OF_APMM, "in a row", products),
        "APConv: 16x16, 3x3, batch 1": (1, "codes", [Layer(n, 16, 16, n, 3, 1, 1, 1, 1) for n in SIZES]),
    }
    for batch in map(int, options.batches.split(",")):
        stride_1 = [each for each in resnet if each.stride == 1]
        groups[f"ResNet-50, stride 1, batch {batch}"] = (batch, "codes", stride_1)
    others = PAIRS[1:]
    tables, raw = [], {}
    for name, (batch, form, layers) in groups.items():
        if options.groups not in name:
            continue
        table = Table(
            name, ["layer", *(f"{pair} us" for pair in PAIRS), *(f"{pair} / w8a8" for pair in others)]
        )
        for layer in layers:
            if options.only not in layer.name:
                continue
            times = measure(layer, batch, form, device, options.rounds)
            ratios = (times[pair] / times["w8a8"] for pair in others)
            table.rows.append([layer.name, *(times[pair] for pair in PAIRS), *ratios])
            raw[f"{name}, {layer.name}"] = times
        if table.rows:
            tables.append(table)
            print(table.markdown(), flush=True)
    notes = [
        f"Microseconds of a layer: device time of a region of {COPIES} equal ones, queued runs, median of "
        f"{options.rounds} rounds; channels last, codes of as many bits out, through InferenceSession.",
        "In a row: each layer reads what the one before makes, in planes where that is better.",
        "Every output is the CPU's. Codes of fewer than 8 bits that come from outside take one look-up more, "
        "of their low bits, which all copies share.",
    ]
    write(options.name, "Products of few bits on a GPU", tables, notes, raw,
          folder=options.out, machine=facts_of(device), commit=options.commit)  # fmt: skip


if __name__ == "__main__":
    main()
