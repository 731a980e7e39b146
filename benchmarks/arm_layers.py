"""Convolutions on ARM in modelled cycles: lowbit beside int8 of ncnn and ONNX Runtime.

python benchmarks/arm_layers.py --cost-tool DIR/armcost.py --setup DIR          w8na8, ResNet-50
python benchmarks/arm_layers.py ... --bits w2a2,w4na4,w1a1 --network densenet121_sampled
python benchmarks/arm_layers.py ... --bits w4na4,w4na4:mla_words_8x16_neon      a row of the kernel table

Bits are written as for layers.py; a row behind them is forced, otherwise selection takes one.

No ARM machine is needed: every program runs under qemu-user with a plugin that counts basic blocks; the cost
tool turns the counts into cycles of a model of the core. Such cycles rank kernels and are no times:
benchmarks/README.md says what they leave out. The tool is called as

    armcost.py run --root DIR/root --plugin DIR/tbcount.so --cpu CPU --mcpu MODELS [--cache] --table-only
               --json FILE --env NAME=VALUE... -- PROGRAM...

and the set-up folder has an arm64 root with Python, `site/` with the wheels of the peers, and the plugin.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from layers import LAYERS, Layer, Pair, Problem
from results import ROOT, Cell, Table, write

PROGRAMS = Path(__file__).with_name("arm")
PAPERS = Path(__file__).with_name("papers.json")
BENCH = ROOT / "build" / "aarch64" / "custom_ops" / "lowbit_arm_bench"
PEERS = {"ncnn": "ncnn", "onnxruntime": "ONNX Runtime"}
LETTERS = {"unsigned": "u", "signed": "s", "bipolar": "b"}

Row = dict[str, Any]
"""What the cost tool says about a layer, and what the program does."""


@dataclass(frozen=True)
class Variant:
    """A pair of bits, and the row of the kernel table that runs it or `auto`."""

    text: str
    pair: Pair
    row: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Such as `w4na4` or `w4na4:mla_words_8x16_neon`."""
        bits, _, row = text.partition(":")
        return cls(text, Pair.parse(bits), row or "auto")

    def case(self, layer: Layer) -> str:
        """An argument of lowbit_arm_bench."""
        pair = self.pair
        x, w = LETTERS[pair.x_encoding], LETTERS[pair.w_encoding]
        return (
            f"{self.row} {pair.x_bits} {x} {pair.w_bits} {w} {pair.narrow:d} "
            f"{layer.in_channels} {layer.height} {layer.width} {layer.out_channels} "
            f"{layer.kernel} {layer.stride} {layer.pad} {layer.group}"
        )


@dataclass(frozen=True)
class CostTool:
    """Runs programs under emulation and gives what each of their regions costs."""

    path: Path
    setup: Path
    cpu: str
    models: str
    cache: bool

    def run(self, program: Sequence[str], regions: int) -> list[Row]:
        """A row per region, with the line of JSON that the program printed for it."""
        environment = {
            "PYTHONPATH": str(self.setup / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "regions.json"
            command = [sys.executable, str(self.path), "run", "--root", str(self.setup / "root")]
            command += ["--plugin", str(self.setup / "tbcount.so"), "--cpu", self.cpu, "--mcpu", self.models]
            command += [f"--env={name}={value}" for name, value in environment.items()]
            command += [*(["--cache"] if self.cache else []), "--table-only", "--json", str(answer)]
            done = subprocess.run([*command, "--", *program], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(program[:2])}: {done.stderr.strip()[-2000:]}")
            costs = json.loads(answer.read_text(encoding="utf-8"))
        facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(costs) != regions or len(facts) != regions:
            raise RuntimeError(
                f"expected {regions} regions, got the cost of {len(costs)} and {len(facts)} lines"
            )
        return [
            {**fact, "cycles": cost["cycles"], "instructions": cost["insns"]}
            | ({"misses": cost["mem"]} if self.cache else {})
            for fact, cost in zip(facts, costs, strict=True)
        ]

    def python(self, script: str, arguments: Sequence[str], regions: int) -> list[Row]:
        """A script of arm/ under the aarch64 Python of the set-up."""
        python = self.setup / "root" / "usr" / "bin" / "python3.11"
        return self.run([str(python), str(PROGRAMS / script), *arguments], regions)

    def versions(self) -> dict[str, str]:
        """Versions of the peers' wheels and of the emulator."""
        found = {}
        for package in PEERS:
            folders = list((self.setup / "site").glob(f"{package}-*.dist-info"))
            if folders:
                found[package] = folders[0].name.removesuffix(".dist-info").split("-")[1]
        text = subprocess.run(
            ["qemu-aarch64", "--version"], capture_output=True, text=True, check=True
        ).stdout
        version = re.search(r"version ([\d.]+)", text)
        return {**found, "qemu-user": version[1] if version else "unknown"}


def ncnn_rows(tool: CostTool, layers: Sequence[Layer]) -> list[Row]:
    """The int8 convolution of ncnn for each layer."""
    fields = ("in_channels", "height", "width", "out_channels", "kernel", "stride", "pad")
    cases = [",".join(str(getattr(layer, field)) for field in fields) for layer in layers]
    return tool.python("ncnn_peer.py", cases, len(layers))


def onnxruntime_rows(tool: CostTool, layers: Sequence[Layer]) -> list[Row]:
    """The int8 convolution of ONNX Runtime for each layer, channels last like ours."""
    with tempfile.TemporaryDirectory() as folder:
        models = []
        for index, layer in enumerate(layers):
            models.append(f"{folder}/{index}.onnx")
            onnx.save(Problem.seeded(layer, Pair.parse("w8na8")).stock_model(), models[-1])
        return tool.python("onnxruntime_peer.py", models, len(layers))


def space_overhead(layer: Layer, row: Row, model_bits: int = 0) -> float:
    """What the ICPP 2020 paper plots in its Fig. 13: the memory of a layer over int8 input and int8 weights.

    The memory is the int8 input and all that the kernel keeps between runs: packed weights, tables. Without
    `model_bits` those are there instead of the weights, as in the paper; with it beside the tensor of the
    model, of so many bits a weight, which ONNX Runtime keeps. What a run packs or transforms is in the
    scratch memory of a thread, which is bounded and stated apart.
    """
    x = layer.in_channels * layer.height * layer.width
    products = layer.kernel**2 * layer.in_channels // layer.group
    tensor = layer.out_channels * ((products * model_bits + 7) // 8)
    packed: int = row["packed_bytes"]
    return (x + tensor + packed) / (x + layer.out_channels * products)


def speed_ups(ours: Sequence[Row], peer: Sequence[Row], model: str) -> list[float]:
    """Cycles of a peer over ours, by layer."""
    return [b["cycles"][model] / a["cycles"][model] for a, b in zip(ours, peer, strict=True)]


def mean(values: Sequence[float]) -> float:
    """Arithmetic; the paper averages speed-ups so."""
    return sum(values) / len(values)


def summary(measured: Mapping[str, list[Row]], variants: Sequence[str], models: Sequence[str]) -> Table:
    """Means over all layers, and as in the paper over those that win."""
    out = Table("Means of the speed-ups", ["bits", "model"])
    peers = [peer for peer in PEERS if peer in measured]
    for peer in peers:
        out.columns += [f"over {PEERS[peer]} int8", "layers that win", "mean of these"]
    for variant in variants:
        for model in models:
            cells: list[Cell] = [variant, model]
            for peer in peers:
                ratios = speed_ups(measured[variant], measured[peer], model)
                wins = [ratio for ratio in ratios if ratio > 1]
                cells += [mean(ratios), f"{len(wins)} of {len(ratios)}", mean(wins) if wins else ""]
            out.rows.append(cells)
    return out


def tables(
    layers: Mapping[str, Layer],
    measured: Mapping[str, list[Row]],
    variants: Sequence[str],
    models: Sequence[str],
) -> list[Table]:
    """Means, then by layer: speed-ups, cycles, rows, space."""

    def by_layer(title: str, columns: Sequence[str], cells: Mapping[str, Sequence[Cell]]) -> Table:
        table = Table(title, ["layer", *columns])
        for index, name in enumerate(layers):
            table.rows.append([name, *[cells[column][index] for column in columns]])
        return table

    out = [summary(measured, variants, models)]
    for model in models:
        for peer in (peer for peer in PEERS if peer in measured):
            ratios = {variant: speed_ups(measured[variant], measured[peer], model) for variant in variants}
            out.append(by_layer(f"Speed-up over {PEERS[peer]} int8, {model}", variants, ratios))
        cycles = {name: [row["cycles"][model] / 1e6 for row in rows] for name, rows in measured.items()}
        out.append(by_layer(f"Million modelled cycles, {model}", list(measured), cycles))
    rows = {variant: [row["row"] for row in measured[variant]] for variant in variants}
    out.append(by_layer("Rows of the kernel table", variants, rows))
    for title, with_model in (
        ("Space overhead, packed weights in place of the int8 weights", False),
        ("Space overhead of a session, packed weights beside the model's", True),
    ):
        space = {
            variant: [
                space_overhead(*pair, Variant.parse(variant).pair.w_bits if with_model else 0)
                for pair in zip(layers.values(), measured[variant], strict=True)
            ]
            for variant in variants
        }
        table = by_layer(title, variants, space)
        table.rows.append(["mean", *[mean(space[variant]) for variant in variants]])
        table.rows.append(["worst", *[max(space[variant]) for variant in variants]])
        out.append(table)
    scratch = [max(row["scratch_bytes"] for row in measured[variant]) / 1024 for variant in variants]
    return [*out, Table("Scratch memory of a thread, KiB, at most", list(variants), [[*scratch]])]


def losing(
    layers: Mapping[str, Layer], measured: Mapping[str, list[Row]], variants: Sequence[str], model: str
) -> list[str]:
    """A sentence per peer and variant that loses somewhere."""
    out = []
    for peer in (peer for peer in PEERS if peer in measured):
        for variant in variants:
            ratios = speed_ups(measured[variant], measured[peer], model)
            named = zip(layers, ratios, strict=True)
            lost = [f"{name.split()[0]} ({ratio:.2f})" for name, ratio in named if ratio <= 1]
            if lost:
                out.append(f"{variant} is not faster than {PEERS[peer]} int8 in {model}: {', '.join(lost)}.")
    return out


def paper_says(network: str) -> list[str]:
    """A sentence with what the ICPP 2020 paper states of the layers of a network; none of other networks."""
    stated = json.loads(PAPERS.read_text(encoding="utf-8"))["icpp2020"]
    figure = {"resnet50_v1": "figure 7", "densenet121_sampled": "figure 14"}.get(network)
    if figure is None:
        return []
    means = ", ".join(
        f"{bits} bits {found['mean']:.2f}" + (f" ({found['wins']} layers)" if "wins" in found else "")
        for bits, found in stated[figure].items()
        if bits.isdigit()
    )
    return [
        "The ICPP 2020 paper measured on a Raspberry Pi 3B, over the ncnn of its time, as mean of the layers "
        f"that win: {means}."
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cost-tool", type=Path, required=True, help="its script")
    parser.add_argument("--setup", type=Path, required=True, help="its folder with root/, site/, tbcount.so")
    parser.add_argument(
        "--bench", type=Path, default=BENCH, help="our program; default: of preset aarch64-linux"
    )
    parser.add_argument("--network", default="resnet50_v1", help="of layers.json; default: resnet50_v1")
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    parser.add_argument("--bits", default="w8na8", help="pairs, or pair:row; default: w8na8")
    parser.add_argument("--cpu", default="cortex-a53", help="what the programs see; default: cortex-a53")
    parser.add_argument("--models", default="a53sim", help="of cycles; default: a53sim")
    parser.add_argument("--cache", action="store_true", help="also simulate caches: MODEL+mem; slow")
    parser.add_argument("--peers", default="ncnn,onnxruntime", help="empty: only our kernels")
    parser.add_argument("--name", help="of the results; default: arm_layers_<network>_<cpu>")
    options = parser.parse_args()
    networks = json.loads(LAYERS.read_text(encoding="utf-8"))["networks"]
    every = {
        f"conv{i + 1} {Layer(*row).name}": Layer(*row) for i, row in enumerate(networks[options.network])
    }
    layers = {name: layer for name, layer in every.items() if options.only in name}
    variants = [Variant.parse(text) for text in options.bits.split(",")]
    tool = CostTool(options.cost_tool, options.setup, options.cpu, options.models, options.cache)

    measured: dict[str, list[Row]] = {}
    peers = {"ncnn": ncnn_rows, "onnxruntime": onnxruntime_rows}
    for peer in options.peers.split(",") if options.peers else []:
        print(f"{peer} ...", flush=True)
        measured[peer] = peers[peer](tool, list(layers.values()))
    for variant in variants:
        print(f"{variant.text} ...", flush=True)
        program = [str(options.bench), *[variant.case(layer) for layer in layers.values()]]
        measured[variant.text] = tool.run(program, len(layers))

    names = [variant.text for variant in variants]
    models = list(measured[names[0]][0]["cycles"])
    notes = [
        "Modelled cycles of one run of a layer, batch 1, one thread: no times, and differences under 10 % "
        "mean little. Whole layers: codes in, packing, products, requantization, codes out.",
        "ncnn: int8 in and out, 8 channels packed together, Winograd where it chooses so. ONNX Runtime: "
        "QLinearConv, channels last, uint8 activations, int8 weights per channel.",
        "+mem adds the misses of simulated caches with fitted penalties."
        if options.cache
        else "Caches were not simulated.",
        "Space overhead: int8 input and what the kernel keeps between runs, over int8 input and int8 "
        "weights; of a session, the model's tensor of packed bits besides, which ONNX Runtime keeps.",
        *paper_says(options.network),
        *[sentence for model in models for sentence in losing(layers, measured, names, model)],
    ]
    write(
        options.name or f"arm_layers_{options.network}_{options.cpu.split(',')[0]}",
        f"ARM: convolutions of {options.network}, modelled cycles of {options.models}",
        tables(layers, measured, names, models),
        notes,
        {"layers": list(layers), "costs": measured},
        machine={
            "cpu": f"{options.cpu} emulated, models {options.models}",
            "cores": 1,
            "system": "Linux aarch64",
            "isa": measured[names[0]][0]["isa"],
        },
        versions=tool.versions(),
    )


if __name__ == "__main__":
    main()
