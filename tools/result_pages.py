"""What the README and benchmarks/results/index.md say about speed, from benchmarks/results/*.json alone.

| function | writes |
| --- | --- |
| claims | the README's table: eight comparisons, among them those that lowbit loses |
| zoo | the README's sentence about the zoo of networks |
| chart | the README's picture: ResNet-50 by bits beside the peers |
| index | benchmarks/results/index.md: every results file, by machine |
| recorded | the page of a results file that no benchmark wrote: figures noted of runs elsewhere |
"""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FEW_BITS = ("w4a4", "w2a2", "w1a1")
NOISE = 1.005
"""Times that differ by less are called equal."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def cell(value: str | int | float) -> str:
    """A cell of a results table; floats with three significant digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


@cache
def load(name: str) -> dict[str, Any]:
    """A results file; an error names it when it is missing."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def lines_of(document: Mapping[str, Any], title: str) -> list[dict[str, Any]]:
    """The rows of one table of a results file, each by the names of its columns."""
    (found,) = [each for each in document["tables"] if each["title"] == title]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


# --- the README's table


@dataclass
class Claim:
    """One comparison: times over those of stock ONNX Runtime, so below 1 is faster."""

    what: str
    stock: str
    lowbit: float
    peers: dict[str, float] = field(default_factory=dict)
    fewer: dict[str, float] = field(default_factory=dict)
    lost: str = ""

    @property
    def best_peer(self) -> str:
        """The fastest of the other peers."""
        return min(self.peers, key=lambda name: self.peers[name])

    def loses(self) -> str:
        """What is faster than lowbit at 8 bits, and which fewer bits are slower than 8; `nothing`."""
        out = [name for name, ratio in self.peers.items() if ratio * NOISE < self.lowbit]
        out += ["stock"] if self.lowbit > NOISE else []
        slower = [bits for bits, ratio in self.fewer.items() if ratio > self.lowbit * NOISE]
        out += [f"{', '.join(slower)} slower than w8a8"] if slower else []
        out += [self.lost] if self.lost else []
        return "; ".join(out) or "-"

    def row(self) -> list[str]:
        """The cells of the README's table, the fastest in bold."""
        peer = self.peers[self.best_peer]
        ratios = [peer, self.lowbit, *(self.fewer.get(bits) for bits in FEW_BITS)]
        least = min(ratio for ratio in ratios if ratio is not None)

        def text(ratio: float | None, name: str = "") -> str:
            if ratio is None:
                return ""
            number = f"{ratio:.2f}"
            return f"{name}**{number}**" if ratio == least else f"{name}{number}"

        return [self.what, self.stock, text(peer, f"{self.best_peer} "), *map(text, ratios[1:]), self.loses()]


def cpu_claim(what: str, file: str, network: str, threads: int = 1) -> Claim:
    """Whole networks as benchmarks/networks.py writes them."""
    rows = [row for row in load(file)["raw"][network] if row["threads"] == threads]
    times = {row["name"].removesuffix(", layers only"): row["median_ms"] for row in rows}
    stock = times["onnxruntime w8a8"]
    fewer = {bits: times[f"lowbit {bits}"] / stock for bits in FEW_BITS if f"lowbit {bits}" in times}
    ours, peer = times["lowbit w8a8"] / stock, times["openvino w8a8"] / stock
    return Claim(what, "int8", ours, {"OpenVINO int8": peer}, fewer)


def arm_claim(what: str, file: str) -> Claim:
    """Modelled cycles of layers: geometric means of the ratios to ONNX Runtime's."""
    document = load(file)
    costs = document["raw"]["costs"]
    model = next(iter(costs["ncnn"][0]["cycles"]))
    cycles = {name: [row["cycles"][model] for row in rows] for name, rows in costs.items()}

    def mean(name: str) -> float:
        ratios = [ours / stock for ours, stock in zip(cycles[name], cycles["onnxruntime"], strict=True)]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    spelled = {bits: bits if bits in cycles else f"{bits[:2]}n{bits[2:]}" for bits in FEW_BITS}
    fewer = {bits: mean(name) for bits, name in spelled.items() if name in cycles}
    pairs = list(zip(cycles["w8na8"], cycles["ncnn"], strict=True))
    lost = sum(ours > peer for ours, peer in pairs)
    text = f"ncnn in {lost} of {len(pairs)} layers" if lost else ""
    return Claim(what, "int8, modelled cycles", mean("w8na8"), {"ncnn int8": mean("ncnn")}, fewer, text)


def gpu_claim(what: str, batch: int) -> Claim:
    """A ResNet-50 beside ONNX Runtime's CUDA provider in fp16, its fastest form, and cuDNN."""
    rows = lines_of(load("cuda_networks"), "resnet50")
    (row,) = [row for row in rows if row["batch"] == batch and row["bits"] == "w8a8"]
    stock = row["ONNX Runtime CUDA fp16* us"]
    recorded = {each["bits"]: each for each in lines_of(load("recorded_cuda_bits"), "resnet50")}
    key = f"batch {batch} us"
    fewer = {bits: recorded[bits][key] / stock for bits in FEW_BITS if bits in recorded}
    peers = {f"cuDNN {kind}": row[f"cuDNN {kind}* us"] / stock for kind in ("int8", "fp16")}
    text = f"CUDA fp16, {stock:.0f} us (int8: {row['ONNX Runtime CUDA int8* us']:.0f})"
    return Claim(what, text, row["us"] / stock, peers, fewer)


def all_claims() -> list[Claim]:
    """The rows of the README's table."""
    return [
        cpu_claim("x86, AVX-512 VNNI, 1 thread: ResNet-50", "resnet50_bits_1t", "resnet50"),
        cpu_claim("the same: DenseNet-121", "networks_1t", "densenet121"),
        cpu_claim("x86, AVX2 alone (a), 1 thread: MobileNetV2", "networks_avx2_1t", "mobilenetv2"),
        cpu_claim("x86 with AMX, 1 thread: ResNet-50", "networks_amx_1t", "resnet50"),
        cpu_claim("the same, 16 threads", "networks_amx_16t", "resnet50", 16),
        arm_claim("ARM Cortex-A53, modelled (b): ResNet-50's layers", "arm_layers_resnet50_a53"),
        gpu_claim("NVIDIA H200 (c), batch 1: ResNet-50", 1),
        gpu_claim("the same, batch 16", 16),
    ]


def claims() -> str:
    """The README's table."""
    header = ["time, stock ONNX Runtime = 1", "stock", "best other", "w8a8", *FEW_BITS, "where it loses"]
    return table(header, [claim.row() for claim in all_claims()])


def zoo() -> str:
    """The README's sentence about the zoo."""
    # Of dynamic quantization there are times alone.
    rows = [row for row in lines_of(load("zoo"), "Configurations") if row["networks"]]
    shares = sorted(float(row["share"].rstrip("%")) for row in rows)
    wrong = sum(row["wrong"] for row in rows)
    open_ends = [row["configuration"] for row in rows if row["unexplained"]]
    quick = next(row for row in rows if row["configuration"] == "u8s8")
    unexplained = f"unexplained ones in {', '.join(open_ends)} alone" if open_ends else "none unexplained"
    sentence = (
        f"Of {quick['networks']} small networks in {len(rows)} configurations (classifiers, detectors, OCR, "
        f"audio, transformers) {shares[0]:.1f} to {shares[-1]:.1f} % of the quantized nodes convert, "
        f"with {wrong} wrong elements, {unexplained}. QDQ int8 takes {quick['cpu: median']:.2f} of stock's "
        f"time in the median, {quick['cpu: slowest']:.2f} at worst:"
    )
    return textwrap.fill(sentence, 118) + "\n[every network](benchmarks/results/zoo.md).\n"


# --- the README's picture


@dataclass(frozen=True)
class Theme:
    """Colors of a picture."""

    text: str
    faint: str
    lowbit: str
    peer: str


THEMES = {
    "light": Theme(text="#1f2328", faint="#59636e", lowbit="#0969da", peer="#a8b1bb"),
    "dark": Theme(text="#f0f6fc", faint="#9198a1", lowbit="#4493f8", peer="#59626e"),
}


@dataclass(frozen=True)
class Panel:
    """Bars that share a scale; those of lowbit have another color."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float]]


def panels() -> list[Panel]:
    """ResNet-50 on three machines."""

    def peers_first(bars: list[tuple[str, float]]) -> list[tuple[str, float]]:
        return sorted(bars, key=lambda bar: bar[0].startswith("lowbit"))

    def ratios(file: str) -> list[tuple[str, float]]:
        """Bars of the peers, then of lowbit."""
        names = {"onnxruntime w8a8": "ONNX Runtime int8", "openvino w8a8": "OpenVINO int8"}
        rows = load(file)["raw"]["resnet50"]
        stock = next(row["median_ms"] for row in rows if row["name"] == "onnxruntime w8a8")
        return peers_first([(names.get(row["name"], row["name"]), row["median_ms"] / stock) for row in rows])

    (gpu,) = [row for row in lines_of(load("cuda_networks"), "resnet50") if row["batch"] == 1]
    peers = ["ONNX Runtime CUDA fp16", "cuDNN int8", "cuDNN fp16"]
    device = [(name, float(gpu[f"{name}* us"])) for name in peers] + [("lowbit w8a8", float(gpu["us"]))]
    device += [
        (f"lowbit {row['bits']}", float(row["batch 1 us"]))
        for row in lines_of(load("recorded_cuda_bits"), "resnet50")
        if row["bits"] != "w8a8"
    ]

    return [
        Panel("x86 with AVX-512 VNNI, 1 thread, ONNX Runtime int8 = 1", "", ratios("resnet50_bits_1t")),
        Panel("x86 with AMX, 1 thread, ONNX Runtime int8 = 1", "", ratios("resnet50_bits_amx_1t")),
        Panel("NVIDIA H200, batch 1 (peers, few bits: recorded)", "us", peers_first(device)),
    ]


def chart(theme: Theme) -> str:
    """An SVG of the panels, one under the other."""
    width, left, step, bar = 640, 200, 22, 14
    room = width - left - 80
    y, out = 26, []
    out.append(f'<text x="0" y="{y - 6}" font-weight="600">ResNet-50 at batch 1: shorter is faster</text>')
    for panel in panels():
        y += 30
        out.append(f'<text x="0" y="{y - 8}" fill="{theme.faint}">{html.escape(panel.title)}</text>')
        longest = max(value for _, value in panel.bars)
        for name, value in panel.bars:
            color = theme.lowbit if name.startswith("lowbit") else theme.peer
            length = max(2.0, room * value / longest)
            text = f"{value:.0f} {panel.unit}" if panel.unit else f"{value:.2f}"
            out += [
                f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>',
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" rx="2" fill="{color}"/>',
                f'<text x="{left + length + 6:.1f}" y="{y + 12}">{text}</text>',
            ]
            y += step
    body = "\n".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 6}" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{theme.text}" role="img">\n'
        "<title>Time of ResNet-50 by bits beside ONNX Runtime, OpenVINO and cuDNN</title>\n"
        f"{body}\n</svg>\n"
    )


# --- benchmarks/results/index.md

GROUPS = {
    "x86-64": "x86-64 with AVX-512 VNNI",
    "amx": "x86-64 with AMX",
    "arm": "64-bit ARM, emulated: modelled cycles and memory, no times",
    "gpu": "NVIDIA GPU",
}
# Files whose tables are too long to repeat, and of those with a shorter summary, its title.
LONG = {"layers_1t": "", "layers_low_bits_1t": "", "pairs_": "", "cuda_fusion": "", "zoo": "Configurations"}
PEERS = ("onnxruntime", "openvino", "ncnn")
SUMS = ("sum", "median", "geometric mean")


def group(machine: Mapping[str, Any]) -> str:
    """A key of GROUPS."""
    if "device" in machine:
        return "gpu"
    if "aarch64" in machine["system"]:
        return "arm"
    return "amx" if machine["isa"] == "amx" else "x86-64"


def summary(name: str, document: Mapping[str, Any]) -> str:
    """The table of a results file that tells the most; of long ones the rows that sum up."""
    tables = document["tables"]
    for start, title in LONG.items():
        if name.startswith(start):
            tables = [each for each in tables if each["title"] == title]
    if not tables:
        tables = [
            {**each, "rows": [row for row in each["rows"] if str(row[0]).startswith(SUMS)]}
            for each in document["tables"]
        ]
    columns = tables[0]["columns"]
    alike = [each for each in tables if each["columns"] == columns]
    several = len(alike) > 1
    if not any(each["rows"] for each in alike):
        return ""
    rows = [
        [*([each["title"]] if several else []), *map(cell, row)] for each in alike for row in each["rows"]
    ]
    marks = [f"\\{note}\n" for note in document["notes"] if note.startswith("*")]
    return "\n".join([table([*([""] if several else []), *columns], rows), *marks])


def index() -> str:
    """benchmarks/results/index.md without the notice that it is generated."""
    parts: dict[str, list[str]] = {key: [] for key in GROUPS}
    files = sorted(RESULTS.glob("*.json"))
    for path in files:
        document = load(path.stem)
        machine, versions = document["machine"], document["versions"]
        hardware = machine.get("device") or f"{machine['cpu']}, {machine['isa']}"
        packages = ", ".join(
            f"{n} {versions[n]}" for n in ("onnxruntime", "openvino", "ncnn") if n in versions
        )
        text = f"### {document['title']}: [{path.stem}]({path.stem}.md)\n\n"
        text += f"{hardware}; {packages}; {document['date']}, commit {document['commit']}: "
        text += f"`{document['command']}`\n\n{summary(path.stem, document)}"
        parts[group(machine)].append(text)
    for page in sorted(RESULTS.glob("*.md")):
        if page.name != "index.md" and page.with_suffix(".json") not in files:
            lines = page.read_text(encoding="utf-8").splitlines()
            facts = " ".join(lines[2 : lines.index("", 2)])
            parts["gpu"].append(f"### [{lines[0].removeprefix('# ')}]({page.name})\n\n{facts}\n")
    body = "\n".join(f"## {GROUPS[key]}\n\n" + "\n".join(texts) for key, texts in parts.items() if texts)
    head = (
        "# Results\n\nEvery results file of this folder, by machine: the table that tells most, and a link\n"
        "to all of it. The JSON beside each page holds every figure. [How it is measured](../README.md).\n\n"
    )
    return head + body


def recorded(path: Path) -> str:
    """The page of a results file that no benchmark wrote, without the notice that it is generated."""
    document = json.loads(path.read_text(encoding="utf-8"))
    machine = document["machine"]
    hardware = machine.get("device") or machine["cpu"]
    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    notes = "".join(f"- {note}\n" for note in document["notes"])
    tables = [
        f"### {each['title']}\n\n{table(each['columns'], [[*map(cell, row)] for row in each['rows']])}"
        for each in document["tables"]
    ]
    facts = (
        f"{hardware}; {versions}; {document['date']}, commit {document['commit']}: `{document['command']}`"
    )
    return "\n".join([f"# {document['title']}\n", f"{facts}\n", notes, *tables])
