"""All benchmarks, as `make bench` runs them: about 30 minutes on an idle machine.

python benchmarks/run.py            writes benchmarks/results/
python benchmarks/run.py --quick    few rounds, two networks: does everything still run?
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

RUNS = [
    ["networks.py"],
    ["networks.py", "--threads", "2"],
    [
        "networks.py",
        "--networks",
        "resnet50",
        "--bits",
        "w8a8,w4a8,w4a4,w2a8,w2a2,w1a2,w1a1",
        "--name",
        "resnet50_bits_1t",
    ],
    ["layers.py", "--networks", "resnet50,mobilenetv2,vgg16", "--bits", "w8a8,w4a8,w4a4,w2a8,w2a2"],
    [
        "layers.py",
        "--networks",
        "resnet50_v1",
        "--bits",
        "w1a1,w1a1u,w1a2,w2a2,w2na2,w1a4,w2a4",
        "--name",
        "layers_low_bits_1t",
    ],
    ["pairs.py", "--networks", "resnet50_v1,cnv,mlp"],
    ["pairs.py", "--networks", "resnet50_v1", "--isa", "avx2"],
]

QUICK = [
    ["networks.py", "--networks", "resnet18,mobilenetv2", "--rounds", "3", "--name", "quick_networks"],
    ["layers.py", "--networks", "resnet18", "--rounds", "2", "--name", "quick_layers"],
    ["pairs.py", "--networks", "cnv", "--pairs", "w1a2,w4a4", "--name", "quick_pairs"],
]


def main() -> int:
    """Runs each benchmark in a process of its own; returns the number of those that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, two networks")
    options = parser.parse_args()
    failed = 0
    for script, *arguments in QUICK if options.quick else RUNS:
        failed += (
            subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode != 0
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
