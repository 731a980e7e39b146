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


def place(**rounds: list[float]) -> dict:
    names = {name: {"rounds": values, "base": [100.0] * 3} for name, values in rounds.items()}
    return {"network": "net", "batch": 1, "tuning": "off", "us": [100.0] * 3, "names": names}


def test_a_name_is_worth_what_it_costs_beyond_the_error(gpu_rows):
    nothing = [100, 100, 100]
    places = {
        "a": place(nothing=nothing, halo=[103, 103.5, 104], team=[101, 104, 98], kept=[101] * 3, apart=[]),
        "b": place(nothing=[102.5] * 3, halo=nothing, team=[], kept=[103] * 3, apart=[]),
    }
    verdicts, costs = gpu_rows.tables(places, ["nothing", "halo", "team", "kept", "apart"])
    assert verdicts.rows == [
        ["nothing", "2 of 2", "+2.5", "0.0", "-"],
        ["halo", "2 of 2", "+3.5", "0.5", "worth it"],
        ["team", "1 of 2", "+1.0", "3.0", "under 1 %"],
        ["kept", "2 of 2", "+1.0", "0.0", "worth it"],
        ["apart", "0 of 2", "-", "-", "not chosen"],
    ]
    assert costs.rows[2] == ["halo", "+3.5 ± 0.5", "+0.0 ± 0.0"]
