"""The generated parts of docs/testing.md, from benchmarks/results/*.json and the tests themselves."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from result_pages import ROOT, load, table

_PYTHON_TEST = re.compile(r"^def test_", re.MULTILINE)
ROUNDED = 100
"""The number of tests is told in hundreds, so that a new test does not change the page."""


def tests() -> str:
    """How many tests there are."""
    functions = sum(len(_PYTHON_TEST.findall(path.read_text("utf-8"))) for path in _test_files())
    return (
        f"More than {functions // ROUNDED * ROUNDED:,} test functions in Python, most of which run for many "
        "kernels, widths, shapes or seeds; and the C++ tests of core, of regions, of devices and of the CUDA "
        "kernels on an emulated GPU.\n"
    )


def _test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def fuzzing() -> str:
    """The fuzzed inputs, by kind and device, and those of libFuzzer."""
    cases: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    (found,) = [each for each in load("fuzzing")["tables"] if each["title"] == "Cases"]
    for kind, count, failed, *_ in found["rows"]:
        cases[kind][0] += int(str(count).replace(",", ""))
        cases[kind][1] += int(str(failed).replace(",", ""))
    rows = [(kind, f"{count:,}", failed) for kind, (count, failed) in sorted(cases.items())]
    drawn = table(["kind and device", "inputs", "failed when they were tried"], rows)
    return f"{drawn}\n{_tables('fuzzers')}"


def faults() -> str:
    """Allocations and file operations that fail."""
    return f"{_tables('fault_injection')}\n{_tables('fault_injection_files')}"


def soak() -> str:
    """Sessions that come and go."""
    return _tables("soak")


def coverage() -> str:
    """Lines and branches by folder; the result's own page lists what is not run."""
    (found,) = [each for each in load("coverage")["tables"] if each["title"] == "Covered"]
    notes = "\n".join(f"- {note}" for note in load("coverage")["notes"])
    return f"{table(found['columns'], found['rows'])}\n{notes}\n"


def _tables(name: str) -> str:
    """All tables of a results file, each with the date and the commit."""
    document = load(name)
    texts = [table(each["columns"], each["rows"]) for each in document["tables"]]
    where = f"[{document['date']}, commit {document['commit']}](../benchmarks/results/{name}.md): "
    return "\n".join([f"{where}`{document['command']}`\n", *texts])


BLOCKS = {"tests": tests, "fuzzing": fuzzing, "faults": faults, "soak": soak, "coverage": coverage}
"""What writes each block of the page."""
