"""Instructions that each way of finishing sums takes on a GPU, by the code that the compiler makes.

python benchmarks/gpu_epilogues.py --nvcc /usr/local/cuda/bin/nvcc

Kernels that finish sums and do nothing else (custom_ops/kernels/cuda/bench/epilogue_counts.cu) are compiled
for sm_90a: what 16 more sums take, less what reads and stores them. No GPU is needed.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
from pathlib import Path

from results import RESULTS, ROOT, Table, write

WAYS = {
    "relu_to_256": "Relu to 256 codes (form A)",
    "relu_to_256_residual": "the same and a residual, on a line",
    "relu_to_128": "Relu to 128 codes of int8 (form B)",
    "relu_to_128_residual": "the same and a residual, on a line",
    "on_lines": "float bias, Relu, 128 codes (forms C, D), or any few codes, on lines",
    "on_lines_residual": "a float bias and a residual behind its rounding to 128 codes, on a line",
    "bias_residual_once": "float bias and a residual, rounded once (form E)",
    "few_codes_residual": "up to 16 codes, on lines, and a residual to as few, on a line",
    "any_to_256": "any 256 codes, a zero point among them",
    "any_to_256_table": "the same and a table (SiLU, HardSwish behind codes)",
    "bias_hard_swish": "float bias, HardSwish",
    "bias_silu": "float bias, SiLU",
    "integers_to_128": "Relu to 128 codes of sums that are integers (K split, or int8 pixels gathered)",
    "integers_to_128_residual": "the same and a residual, on a line",
    "division": "a residual where nothing faster is exact: a division",
}
SOURCE = ROOT / "custom_ops/kernels/cuda/bench/epilogue_counts.cu"
OUTPUTS = 16
MOVES = {False: 8, True: 12}
"""Instructions that read so many sums and store their codes, four at a time; with residuals."""
_UNCOUNTED = {0x918, 0x947}
"""Opcodes of NOP and BRA: what fills up a function, and the loop that ends it."""


def instructions(cubin: bytes) -> dict[str, int]:
    """Functions of a cubin with their instructions (ELF, 64 bits, little endian)."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    table = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(count)]
    strings = table[names][4]
    found = {}
    for name_at, _, _, _, at, length in table:
        name = cubin[strings + name_at : cubin.index(b"\0", strings + name_at)].decode()
        if name.startswith(".text."):
            words = struct.iter_unpack("<QQ", cubin[at : at + length])
            found[name.removeprefix(".text.")] = sum(low & 0xFFF not in _UNCOUNTED for low, _ in words)
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    options = parser.parse_args()
    version = subprocess.run([options.nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    release = version.partition("release ")[2].partition(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "ways.cubin"
        flags = ["-std=c++20", "-O3", "-fmad=false", "-arch=sm_90a", "-cubin", f"-I{ROOT / 'custom_ops'}"]
        subprocess.run([options.nvcc, *flags, "-o", cubin, SOURCE], check=True)
        counts = instructions(cubin.read_bytes())
    table = Table("instructions", ["way", "of an output"])
    for name, text in WAYS.items():
        more = counts[f"{name}_many"] - counts[f"{name}_few"]
        table.rows.append([text, (more - MOVES["residual" in name or name == "division"]) / OUTPUTS])
    write(
        "gpu_epilogues",
        "Instructions of an output, by the way sums are finished on a GPU",
        [table],
        [
            f"sm_90a, nvcc {release}. Sums in registers to codes in words; "
            "reading and storing are not counted.",
            "What a thread does once is not counted, the constants of four channels among it.",
        ],
        counts,
        folder=options.out,
    )


if __name__ == "__main__":
    main()
