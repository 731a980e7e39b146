"""benchmarks/gpu_rows.py: which kernels may go, and what a measurement says about them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_rows")


def test_every_kernel_of_hopper_alone_is_measured(gpu_rows, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    docs = importlib.import_module("generate_docs")
    rows = [*docs.cuda_rows("conv"), *docs.cuda_rows("fused")]
    assert {row.name for row in rows if row.needs == "sm_90a"} == set(gpu_rows.ROWS)
    for name in gpu_rows.FUSIONS:
        assert f"`{name}`" in docs.fusion_table()


def place(gpu_rows, **rounds: list[float]) -> dict:
    names = {name: {"rounds": values, "base": [100.0] * 3} for name, values in rounds.items()}
    return {"network": "net", "batch": 1, "tuning": "off", "us": [100.0] * 3, "names": names}


def test_a_name_is_worth_what_it_costs_beyond_its_spread(gpu_rows):
    places = {
        "a": place(gpu_rows, nothing=[100, 100, 100], halo=[103, 103.5, 104], team=[101, 104, 98], apart=[]),
        "b": place(gpu_rows, nothing=[99, 100, 101], halo=[100, 100, 100], team=[], apart=[]),
    }
    verdicts, costs = gpu_rows.tables(places, ["nothing", "halo", "team", "apart"])
    assert verdicts.rows == [
        ["nothing", "2 of 2", "+0.0", "0.0", "-"],
        ["halo", "2 of 2", "+3.5", "0.5", "worth it"],
        ["team", "1 of 2", "+1.0", "3.0", "under 1 %"],
        ["apart", "0 of 2", "-", "-", "not chosen"],
    ]
    assert costs.rows[2] == ["halo", "+3.5 ± 0.5", "+0.0 ± 0.0"]
