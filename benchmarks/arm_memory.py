"""Memory and file size of sessions on 64-bit ARM: lowbit beside stock int8 of ONNX Runtime.

make wheel-aarch64
python tools/aarch64_python.py setup dist/*_aarch64.whl
python benchmarks/arm_memory.py [--network resnet50] [--bits w8a8,w4a4,w2a2] [--cpus cortex-a53]

Each session is a process of its own, aarch64 onnxruntime under qemu-user. The emulator is told to keep the
memory of the program it runs in one range of addresses, so the pages of that range (/proc/PID/smaps) are
those that the program would have on a board; the emulator's own, its translated code above all, lie outside
and do not count. The peak is the largest of samples every 50 ms: emulated code is slow enough for that.
`--cpus host` measures this machine's own Python the same way, beside what the kernel says the peak was.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

import lowbit
import onnxruntime as ort
from networks import built, converted
from results import ROOT, Cell, Table, write

PROGRAM = Path(__file__).with_name("arm") / "session.py"
PYTHON = ROOT / "tools" / "aarch64_python.py"
LIBRARY = ROOT / ".cache" / "aarch64" / "python" / "lowbit" / "onnxruntime_ep_lowbit" / "liblowbit.so"
HOST = "host"
# Where the emulated program's addresses lie in the emulator's, and how many of them there are.
BASE, SIZE = 1 << 45, 1 << 36
SECONDS_BETWEEN_SAMPLES = 0.05


@dataclass(frozen=True)
class Subject:
    """What a session is made of."""

    name: str
    path: Path
    device: str


@dataclass(frozen=True)
class Memory:
    """Bytes of resident pages: all of them, and those that no file backs."""

    resident: int
    anonymous: int


@dataclass(frozen=True)
class Measured:
    """A session's process: before it, its peak, when it was made, after a run, less what was free then."""

    subject: str
    cpu: str
    file_bytes: int
    before: Memory
    peak: Memory
    opened: Memory
    ran: Memory
    trimmed: Memory
    kernel_peak: int | None


def memory(pid: int, low: int, high: int) -> Memory:
    """What a process holds in a range of addresses."""
    resident = anonymous = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = low <= int(span[1], 16) < high
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
        elif inside and line.startswith("Anonymous:"):
            anonymous += int(line.split()[1]) * 1024
    return Memory(resident, anonymous)


def larger(a: Memory, b: Memory) -> Memory:
    """The larger of each."""
    return Memory(max(a.resident, b.resident), max(a.anonymous, b.anonymous))


def measure(subject: Subject, cpu: str) -> Measured:
    """Runs one session in a process of its own and watches it."""
    env, low, high = dict(os.environ), 0, 1 << 64
    if cpu == HOST:
        words, library = [sys.executable], Path(lowbit.get_library_path())
    else:
        words, library = [sys.executable, PYTHON, "run", "--cpu", cpu], LIBRARY
        env |= {"QEMU_GUEST_BASE": hex(BASE), "QEMU_RESERVED_VA": hex(SIZE)}
        low, high = BASE, BASE + SIZE
    words += [PROGRAM, subject.path, subject.device, library]
    pipe = subprocess.PIPE
    process = subprocess.Popen([str(word) for word in words], env=env, text=True, stdin=pipe, stdout=pipe)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        stages, peak, kernel_peak = watch(process.pid, process.stdin, process.stdout, low, high)
    if process.returncode != 0:
        raise RuntimeError(f"{subject.name} on {cpu} ended with {process.returncode}")
    found = [stages[name] for name in ("ready", "open", "ran", "trimmed")]
    size = subject.path.stat().st_size
    # The kernel sees the emulator, not the program that it emulates.
    return Measured(subject.name, cpu, size, found[0], peak, *found[1:], kernel_peak if cpu == HOST else None)


def watch(
    pid: int, asked: IO[str], told: IO[str], low: int, high: int
) -> tuple[dict[str, Memory], Memory, int | None]:
    """Samples a process until it ends: what it held at each stage it told of, its peak, and the kernel's."""
    stages: dict[str, Memory] = {}
    peak = Memory(0, 0)
    kernel_peak = None
    while True:
        spoke, _, _ = select.select([told], [], [], SECONDS_BETWEEN_SAMPLES)
        line = told.readline() if spoke else None
        if line == "":
            return stages, peak, kernel_peak
        now = memory(pid, low, high)
        peak = larger(peak, now)
        if line:
            stages[line.strip()] = now
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            kernel_peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024
            asked.write("\n")
            asked.flush()


def isa(cpu: str) -> str:
    """The level of instructions that lowbit finds there."""
    python = [sys.executable] if cpu == HOST else [sys.executable, str(PYTHON), "run", "--cpu", cpu]
    words = [*python, "-c", "from lowbit import _native; print(_native.default_isa())"]
    return subprocess.run(words, check=True, text=True, capture_output=True).stdout.strip()


def optimized(source: Path) -> Path:
    """A stock model as ONNX Runtime rewrites it for any CPU: QOperator nodes."""
    path = source.with_suffix(".qoperator.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return path


def subjects(network: str, pairs: list[str]) -> list[Subject]:
    """Stock int8 in both of its forms, and lowbit both ways at each pair of bits."""
    stock = built(network, "w8a8")
    listed = [
        Subject("onnxruntime w8a8, QDQ", stock, "stock"),
        Subject("onnxruntime w8a8, QOperator", optimized(stock), "stock"),
    ]
    for bits in pairs:
        path = converted(built(network, bits))
        listed += [Subject(f"lowbit {bits}, {device}", path, device) for device in ("cpu", "cpu-ep")]
    return listed


def table(cpu: str, rows: list[Measured]) -> Table:
    """Megabytes of 10^6 bytes."""
    columns = ["session", "file MB", "peak MB", "of it the session's", "to stock QDQ", "in use MB"]
    out = Table(cpu, columns)
    ours = [row.peak.resident - row.before.resident for row in rows]
    for row, session in zip(rows, ours, strict=True):
        cells = [row.file_bytes, row.peak.resident, session]
        used = row.trimmed.resident - row.before.resident
        out.rows.append([row.subject, *(n / 1e6 for n in cells), session / ours[0], used / 1e6])
    return out


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--bits", default="w8a8,w4a4,w2a2")
    parser.add_argument("--cpus", default="cortex-a53", help="of qemu, separated by spaces; `host`: none")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--name", default="arm_memory", help="name of the results file")
    options = parser.parse_args()
    listed, cpus = subjects(options.network, options.bits.split(",")), options.cpus.split()
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = [(subject, cpu) for cpu in cpus for subject in listed]
        rows = list(pool.map(lambda case: measure(*case), cases))
    levels = {cpu: isa(cpu) for cpu in cpus}
    tables = [table(f"{cpu} ({levels[cpu]})", [row for row in rows if row.cpu == cpu]) for cpu in cpus]
    emulated = [cpu for cpu in cpus if cpu != HOST]
    machine: dict[str, Cell] = {"isa": ", ".join(levels.values())}
    if emulated:
        machine |= {"cpu": f"{' and '.join(emulated)} emulated", "cores": 1, "system": "Linux aarch64"}
    emulator = subprocess.run(["qemu-aarch64", "--version"], check=True, text=True, capture_output=True)
    notes = [
        f"{options.network}, batch 1, 224x224, seeded weights; one thread. Each session is made from a file "
        "and run once, in a process of its own.",
        "peak MB: the most resident pages of the program, with Python's and libraries', not the emulator's.",
        "Of it the session's: less what the process held when Python and onnxruntime were loaded. In "
        "use: the same after a run and `malloc_trim(0)`, which gives back what the C library holds free.",
        "QDQ: as `quantize_static` writes it, fused when the session is made. QOperator: fused beforehand.",
        "cpu: custom ops; cpu-ep: the execution provider.",
        "The form of packed weights is that of the kernels which the CPU's level of instructions gets.",
    ]
    versions = {name: metadata.version(name) for name in ("onnxruntime", "numpy")}
    versions["qemu"] = emulator.stdout.split()[2]
    write(
        options.name,
        f"Memory of sessions on 64-bit ARM: {options.network}",
        tables,
        notes,
        [asdict(row) for row in rows],
        machine=machine,
        versions=versions,
    )


if __name__ == "__main__":
    main()
