"""Runs the targets of libFuzzer for some minutes: `python -m tests.fuzz.run --minutes 5 --report`.

They are built from a folder that was configured with clang, -DLOWBIT_FUZZERS=ON and, to see more,
-DLOWBIT_SANITIZE="address;undefined" (build/fuzz, or what `--build` names). What they find lies in its
folder found/ and makes the exit status 1; `--report` writes benchmarks/results/fuzzers.md and .json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "node": "attributes and constants of a node: decoded, its output's shape inferred",
    "compiled": "a compiled region (EPContext) behind its checksum: loaded, planned",
    "tune_file": "a file of measured choices, and one whose checksum is right",
}


def start(build: Path, target: str, seconds: float, seed: int) -> subprocess.Popen[str]:
    """A fuzzer that ends by itself."""
    found = build / "found" / target
    found.mkdir(parents=True, exist_ok=True)
    command = [
        build / "tests/fuzz" / f"lowbit_fuzz_{target}",
        f"-max_total_time={seconds:.0f}",
        f"-seed={seed}",
    ]
    command += [
        "-max_len=4096",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
        build / "corpus" / target,
    ]
    with (build / f"{target}.log").open("w") as log:
        return subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, text=True)


def told(build: Path, target: str) -> dict[str, int]:
    """What the fuzzer's log says of the inputs it tried and of the edges of the code that they reached."""
    text = (build / f"{target}.log").read_text(errors="replace")
    inputs = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    return {
        "inputs": int(inputs[1]) if inputs else 0,
        "edges": max((int(edges) for edges in re.findall(r"cov: (\d+)", text)), default=0),
        "kept": len(list((build / "corpus" / target).iterdir())),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    subprocess.run([given.build / "tests/fuzz/lowbit_fuzz_seeds", given.build / "corpus"], check=True)
    begun = time.monotonic()
    running = {target: start(given.build, target, given.minutes * 60, given.seed) for target in TARGETS}
    found = {target: int(process.wait() != 0) for target, process in running.items()}
    counts = {target: told(given.build, target) for target in TARGETS}
    for target, count in counts.items():
        print(f"{target}: {count}, {found[target]} found", flush=True)
    if given.report:
        report(counts, found, (time.monotonic() - begun) / 60, given.seed)
    return int(any(found.values()))


def report(counts: dict[str, dict[str, int]], found: dict[str, int], minutes: float, seed: int) -> None:
    """benchmarks/results/fuzzers.md and .json."""
    from benchmarks import results

    table = results.Table("Targets", ["target", "input", "inputs", "edges reached", "inputs kept", "found"])
    for target, count in counts.items():
        row = [f"{count['inputs']:,}", count["edges"], count["kept"], found[target]]
        table.rows.append([target, TARGETS[target], *row])
    notes = [
        f"{minutes:.1f} minutes, all targets at once, seed {seed}; AddressSanitizer and UBSan.",
        "Found: whether the target crashed, hung, or broke what it checks.",
    ]
    results.write("fuzzers", "libFuzzer", [table], notes, {"counts": counts, "found": found, "seed": seed})


if __name__ == "__main__":
    sys.exit(main())
