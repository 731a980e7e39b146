"""The tables of docs/papers.md: what papers state (benchmarks/papers.json) beside the results files.

Speed-ups are averaged as the papers do it, arithmetically over the layers that win, with their number.
ARM's are ratios of modelled cycles: without caches, then with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from result_pages import RESULTS, ROOT, lines_of, load, table

MODELS = ("a53sim", "a53sim+mem")
OWN = {2: "mla_bytes_4x16_neon", 3: "mla_bytes_4x16_neon"} | dict.fromkeys(range(4, 8), "smlal_4x16_neon")
"""The paper's own kernels by bits. At 8 bits a 16-bit sum of two products overflows: ours refuses."""


def paper(figure: str) -> dict[str, Any]:
    """What the ICPP 2020 paper states about a figure."""
    document = json.loads((ROOT / "benchmarks" / "papers.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = document["icpp2020"][figure]
    return found


def pair(bits: int) -> str:
    """The pair of bits that stands for the paper's: from 4 bits on its weights are symmetric."""
    return f"w{bits}a{bits}" if bits < 4 else f"w{bits}na{bits}"


def winners(ratios: Sequence[float]) -> str:
    """`17 of 19, 1.60`: how many layers win, and the mean of these."""
    wins = [ratio for ratio in ratios if ratio > 1]
    mean = f", {sum(wins) / len(wins):.2f}" if wins else ""
    return f"{len(wins)} of {len(ratios)}{mean}"


def stated(figure: str, key: str) -> str:
    """The same of the paper."""
    values = paper(figure)
    found = values[key] if key else values
    count = f"{found['wins']} of {values['layers']}, " if "wins" in found else ""
    return f"{count}{found['mean']:.2f}"


def cycles(file: str, variant: str, model: str) -> list[float]:
    """Modelled cycles by layer of a file of benchmarks/arm_layers.py."""
    return [row["cycles"][model] for row in load(file)["raw"]["costs"][variant]]


def speed_ups(file: str, variant: str, peer: str, only: str = "") -> list[str]:
    """`winners` of a variant over another, in both models; of the layers whose name holds `only`."""
    out = []
    names = load(file)["raw"]["layers"]
    for model in MODELS:
        both = zip(names, cycles(file, peer, model), cycles(file, variant, model), strict=True)
        out.append(winners([theirs / ours for name, theirs, ours in both if only in name]))
    return out


def arm_layers() -> str:
    """Figure 7."""
    file, rows = "arm_layers_paper_a53", []
    for bits in range(2, 9):
        own = speed_ups(file, f"{pair(bits)}:{OWN[bits]}", "ncnn") if bits in OWN else ["refused"] * 2
        chosen = speed_ups(file, pair(bits), "ncnn")
        rows.append([bits, stated("figure 7", str(bits)), *own, *chosen])
    header = ["bits", "paper", "its kernels here", "with caches", "chosen kernels here", "with caches"]
    return table(header, rows)


def arm_winograd() -> str:
    """Figure 8."""
    file, rows = "arm_layers_resnet50_3x3_a53", []
    for bits in (4, 5, 6):
        direct = speed_ups(file, f"{pair(bits)}:mla_words_8x16_neon", "ncnn")
        chosen = speed_ups(file, pair(bits), "ncnn")
        rows.append([bits, stated("figure 8", str(bits)), *chosen, *direct])
    header = ["bits", "paper", "Winograd here", "with caches", "direct kernel here", "with caches"]
    return table(header, rows)


def arm_popcount() -> str:
    """Figure 9."""
    file, bitserial = "arm_layers_paper_a53", "w2a2:bitserial_8x16_neon"
    rows = [
        ["the paper's GEMM over TVM's popcount", stated("figure 9", ""), ""],
        [
            "its kernel here over bit-serial here",
            *speed_ups(file, f"w2a2:{OWN[2]}", bitserial),
        ],
        ["the chosen kernel over bit-serial here", *speed_ups(file, "w2a2", bitserial)],
    ]
    return table(["2 bits", "layers that win, mean of these", "with caches"], rows)


def arm_space() -> str:
    """Figure 13."""
    least, mean, most = paper("figure 13")["total"]
    rows = [["paper, im2col and packing", f"{least:.2f}", f"{mean:.2f}", f"{most:.2f}"]]
    document = load("arm_layers_resnet50_a53")
    for title, name in (
        ("Space overhead, packed weights in place of the int8 weights", "here, as the paper counts"),
        ("Space overhead of a session, packed weights beside the model's", "here, of a session"),
    ):
        for bits in (2, 4, 8):
            values = {row["layer"]: row[pair(bits)] for row in lines_of(document, title)}
            mean, most = values.pop("mean"), values.pop("worst")
            rows.append([f"{name}, {bits} bits", f"{min(values.values()):.2f}", f"{mean:.2f}", f"{most:.2f}"])
    return table(["memory over int8 input and weights", "least", "mean", "most"], rows)


def arm_densenet() -> str:
    """Figure 14."""
    file = "arm_layers_densenet121_a53"
    rows = [
        [bits, stated("figure 14", str(bits)), *speed_ups(file, pair(bits), "ncnn")] for bits in range(2, 9)
    ]
    return table(["bits", "paper", "chosen kernels here", "with caches"], rows)


def gpu_rows(batch: int) -> list[dict[str, float]]:
    """The 19 layers of benchmarks/results/cuda_layers.md at a batch: microseconds by column."""
    text = (RESULTS / "cuda_layers.md").read_text(encoding="utf-8")
    part = text.partition(f"## Batch {batch}\n")[2].partition("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line
    ]
    header, rows = lines[0], [line for line in lines if line[0].startswith("conv")]
    return [{name: float(cell) for name, cell in zip(header[1:6], row[1:6], strict=True)} for row in rows]


def gpu_layers() -> str:
    """Figures 10 and 11."""
    rows = []
    for batch in (1, 16):
        layers, theirs = gpu_rows(batch), paper("figure 10")[str(batch)]
        ours = winners([row["cuDNN"] / row["tuned"] for row in layers])
        stated_there = f"{theirs['wins']} of 19, {theirs['mean']:.2f}"
        rows.append([f"8 bits over cuDNN int8, batch {batch}", stated_there, ours])
    gains = [row["chosen"] / row["tuned"] for row in gpu_rows(1)]
    mean = sum(gains) / len(gains)
    rows.append(["gain of the profile run, 8 bits, batch 1", f"{paper('figure 11')['8']:.2f}", f"{mean:.2f}"])
    return table(["figures 10, 11", "paper, RTX 2080 Ti", "here, H200"], rows)


def gpu_fusion() -> str:
    """Figure 12."""
    layers = [row for row in lines_of(load("cuda_fusion_layers"), "batch 1") if "@" in str(row["layer"])]
    rows = []
    for name, column in (("dequantize", "dequantize apart / fused"), ("relu", "relu apart / fused")):
        mean = sum(row[column] for row in layers) / len(layers)
        least, most = min(row[column] for row in layers), max(row[column] for row in layers)
        here = f"{mean:.2f} ({least:.2f} to {most:.2f})"
        rows.append([f"convolution and {name}", f"{paper('figure 12')[name]:.2f}", here])
    return table(["figure 12, 8 bits, batch 1", "paper, RTX 2080 Ti", "here, H200"], rows)


def gpu_bits() -> str:
    """What fewer bits cost a network on the GPU today."""
    rows = lines_of(load("recorded_cuda_bits"), "resnet50")
    eight = rows[0]
    columns = [name for name in eight if name != "bits"]
    body = [[row["bits"], *(f"{row[name] / eight[name]:.2f}" for name in columns)] for row in rows]
    return table(["ResNet-50, time over w8a8", *(name.removesuffix(" us") for name in columns)], body)


def cpu_bits() -> str:
    """What fewer bits gain on an x86 CPU: geometric means over the 19 layers."""
    layers = load("layers_low_bits_1t")["raw"]["resnet50_v1"]
    rows = []
    for name in ("w8a8", "w1a1", "w1a2", "w1a4", "w2a2", "w2a4"):
        logs = [
            math.log(row["median_ms"]["onnxruntime w8a8"] / row["median_ms"][f"lowbit {name}"])
            for row in layers
        ]
        rows.append([name, f"{math.exp(sum(logs) / len(logs)):.2f}"])
    return table(["bits", "times as fast as ONNX Runtime int8"], rows)


BLOCKS = {
    "figure 7": arm_layers,
    "figure 8": arm_winograd,
    "figure 9": arm_popcount,
    "figure 13": arm_space,
    "figure 14": arm_densenet,
    "figures 10 and 11": gpu_layers,
    "figure 12": gpu_fusion,
    "few bits on a GPU": gpu_bits,
    "few bits on a CPU": cpu_bits,
}
