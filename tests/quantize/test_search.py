"""lowbit search: groups, the integer program, targets; a search gives the same file however it runs."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from lowbit.cli import cli
from lowbit.cli.common import Out
from lowbit.cli.search import _print as print_search
from lowbit.errors import LowBitError
from lowbit.inspection.search_html import render
from lowbit.measure import bench
from lowbit.quantizer.config import Config
from lowbit.quantizer.quantize import CACHE_BYTES, Run
from lowbit.quantizer.ranges import Statistics
from lowbit.quantizer.sites import Plan
from lowbit.searcher import latency
from lowbit.searcher import search as steps
from lowbit.searcher.executor import measure_packed
from lowbit.searcher.groups import Group, groups_of, overrides_of
from lowbit.searcher.latency import Times
from lowbit.searcher.loss import compare
from lowbit.searcher.network import Network
from lowbit.searcher.report import SearchResult
from lowbit.searcher.solve import LayerCost, choose, total_cost
from lowbit.searcher.target import Drop, Target

from tests.support import ClusterHere

from .networks import Builder, images, residual

QUICK: dict[str, Any] = {"bits": (2, 4, 8), "points": 3, "tries": 4, "rounding": "gptq"}
SIZE = "size=6.5kB"  # between the smallest and the largest candidate of `short`


def short() -> onnx.ModelProto:
    """A residual block between the first and the last layer: three layers to choose widths for.

    Most tests search it: a second block would double what they take, and nothing that they look at.
    """
    b = Builder()
    x = b.node("Relu", [b.batch_norm(b.conv("x", 8, bias=False))])
    y = b.conv(b.node("Relu", [b.conv(x, 16, strides=[2, 2])]), 16)
    x = b.node("Relu", [b.node("Add", [b.conv(x, 16, 1, strides=[2, 2], pads=[0] * 4), y])])
    return b.model(b.node("Softmax", [b.head(x)]))


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times need not be right here."""
    monkeypatch.setattr(latency, "_ROUNDS", 1)
    monkeypatch.setattr(bench, "BLOCK_SECONDS", 0.005)


@pytest.fixture(scope="module")
def plain() -> SearchResult:
    """A search in this process, without a state."""
    return lowbit.search(short(), images(), target=SIZE, **QUICK)


def opened(model: onnx.ModelProto, folder: Path, bits: str = "w2a8") -> Run:
    run = Run(model, images(4), Config(bits), folder, 1, CACHE_BYTES, None, lambda *_: None)
    run.open()
    return run


def written(result: SearchResult) -> bytes:
    """The bytes of the file."""
    return result.model.SerializeToString(deterministic=True)


# Groups


def test_a_residual_trunk_is_one_group(tmp_path: Path) -> None:
    b = Builder()
    x = b.node("Relu", [b.conv("x", 8)])
    for _ in range(2):
        x = b.node("Relu", [b.node("Add", [b.conv(b.node("Relu", [b.conv(x, 8)]), 8), x])])
    run = opened(b.model(b.head(x)), tmp_path)
    groups = groups_of(run.proto, run.plan, (2, 4), (4, 8))
    # Behind the first convolution and behind both Adds; what lies inside of a block is a group of its own.
    (trunk,) = [group for group in groups if len(group.tensors) == 3]
    assert x in trunk.tensors
    assert len(trunk.layers) == 2
    assert sum(len(group.tensors) == 1 and not group.rule for group in groups) == 2


def test_operands_of_a_concat_are_one_group(tmp_path: Path) -> None:
    b = Builder()
    x = b.node("Relu", [b.conv("x", 8)])
    parts = [b.node("Relu", [b.conv(x, 4)]), b.node("Relu", [b.conv(x, 4, 1)])]
    joined = b.node("Concat", parts, 8, axis=1)
    run = opened(b.model(b.head(b.node("Relu", [b.conv(joined, 8)]))), tmp_path)
    groups = groups_of(run.proto, run.plan, (2, 4), (4, 8))
    (group,) = [g for g in groups if set(parts) & set(g.tensors)]
    assert {*parts, joined} <= set(group.tensors)


def test_what_a_rule_decides_is_not_searched(plain: SearchResult) -> None:
    rules = {group.name: group.rule for group in plain.report.groups if not group.tensors}
    assert [bool(rule) for rule in rules.values()].count(True) == 2  # the first layer and the last one
    assert set(rules.values()) == {"", "ends"}


# What judges


def test_a_half_judges_what_the_other_one_rounds(tmp_path: Path) -> None:
    run = Run(short(), images(12), Config("w2a8"), tmp_path, 1, CACHE_BYTES, None, lambda *_: None)
    network = Network(run.source.proto, Plan(), Statistics({}, {}), run.config, run.spool, [], 1)
    assert [(half, spool.samples) for half, spool in network.judged] == [(0, 6), (1, 6)]
    network.spool = run.spool.half(0)  # too few for halves
    del network.judged
    assert [half for half, _ in network.judged] == [None]


def test_images_may_judge_without_labels() -> None:
    few: dict[str, Any] = {**QUICK, "tries": 1}
    result = lowbit.search(short(), images(), target=SIZE, judge={"x": images(20, seed=9)}, **few)
    assert result.report.judges == 20
    assert result.report.drop_of == "agreement"
    with pytest.raises(LowBitError, match="labels belong to images that judge"):
        lowbit.search(short(), images(), target=SIZE, labels=[0], **few)


def test_harm_is_fitted_to_what_was_measured(tmp_path: Path) -> None:
    groups = [Group(name, (name,), (), (2, 4)) for name in "abc"]
    network: Any = types.SimpleNamespace(groups=groups, exact=[], labels=None, threads=1, judges=None,
                                         spool=types.SimpleNamespace(samples=1000))  # fmt: skip
    search = steps._Search(network, Target.parse("size=1kB"), None, "size", "cpu", 2, 9, tmp_path,
                           lambda *_: None)  # fmt: skip
    search.alone = {name: {2: 1.0, 4: 0.1} for name in "abc"}
    search.harm = {name: dict(each) for name, each in search.alone.items()}
    true = {"a": {2: 3.0, 4: 0.1}, "b": {2: 1.0, 4: 0.1}, "c": {2: 0.2, 4: 0.1}}
    for widths in itertools.product((2, 4), repeat=3):
        made = dict(zip("abc", widths, strict=True))
        loss = sum(true[name][width] for name, width in made.items())
        search.known[str(widths)] = (made, {"divergence": loss})
    search._fit_harm(2.0)
    gains = {name: each[2] - each[4] for name, each in search.harm.items()}
    assert gains["a"] > 1.8 * gains["b"] > 3 * gains["c"] >= 0


# The integer program


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = [Group(f"w{i}", (f"l{i}",), (), (2, 4, 8)) for i in range(4)]
    inputs = [Group(f"a{i}", (f"l{2 * i}", f"l{2 * i + 1}"), (f"t{i}",), (4, 8)) for i in range(2)]
    groups = [*weights, *inputs]
    harm = {group.name: {bits: float(rng.random()) for bits in group.widths} for group in groups}
    costs = []
    for i in range(4):
        pairs = [(w, a) for w in (2, 4, 8) for a in (4, 8) if (w, a) == (8, 8) or rng.random() > 0.2]
        costs.append(LayerCost(f"w{i}", f"a{i // 2}", {pair: float(rng.random()) for pair in pairs}))
    every = [
        dict(zip((g.name for g in groups), widths, strict=True))
        for widths in itertools.product(*(g.widths for g in groups))
    ]
    for budget in (0.0, 1.0, 1.7, 2.5, 10.0):
        fitting = [widths for widths in every if total_cost(costs, widths) <= budget]
        found = choose(groups, harm, costs, budget)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert total_cost(costs, found) <= budget + 1e-6

        def worth(widths: dict[str, int]) -> float:
            return sum(harm[name][bits] for name, bits in widths.items())

        assert worth(found) == pytest.approx(min(map(worth, fitting)), abs=1e-5)


def test_bounds_of_groups_hold() -> None:
    groups = [Group("a", ("a",), (), (2, 4, 8)), Group("b", ("b",), (), (2, 4, 8))]
    harm = {"a": {2: 1.0, 4: 0.5, 8: 0.0}, "b": {2: 9.0, 4: 5.0, 8: 0.0}}
    costs = [LayerCost(name, None, {(b, 0): float(b) for b in (2, 4, 8)}) for name in "ab"]
    assert choose(groups, harm, costs, 10) == {"a": 2, "b": 8}
    assert choose(groups, harm, costs, 10, least={"a": 4}) == {"a": 4, "b": 4}
    assert choose(groups, harm, costs, 16, most={"b": 4}) == {"a": 8, "b": 4}
    assert choose(groups, harm, costs, 3) is None


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(LowBitError, match=r"lowbit\[quantize\]"):
        choose([], {}, [], 1)


# Targets and losses


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("latency=5ms", "latency", 5), ("latency=800us", "latency", 0.8), ("size=2MB", "size", 2e6),
     ("size=1.5KiB", "size", 1536), ("drop=1%", "drop", 0.01), ("drop=0.02", "drop", 0.02)],
)  # fmt: skip
def test_targets(text: str, kind: str, value: float) -> None:
    target = Target.parse(text)
    assert target.kind == kind
    assert target.value == pytest.approx(value)


def test_a_drop_may_be_relative() -> None:
    assert Drop.parse("2%rel") == Drop(0.02, relative=True)
    assert str(Drop.parse("2%rel")) == "2%rel"


@pytest.mark.parametrize("text", ["5ms", "latency=5", "latency=5MB", "size=0kB", "drop=", "drop=2", "fast=1"])
def test_a_target_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(LowBitError, match="expected"):
        Target.parse(text)


def test_the_divergence_is_the_same_of_scores_and_probabilities() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 6, 5)).astype(np.float32)

    def softmax(x: Any) -> Any:
        return np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)

    scores, probabilities = compare([a], [b]), compare([softmax(a)], [softmax(b)])
    assert scores.divergence == pytest.approx(probabilities.divergence, rel=1e-4)
    assert scores.disagreement == probabilities.disagreement
    assert compare([a], [a]).divergence == 0
    image = rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
    assert compare([image], [image * 1.1]).divergence == pytest.approx(0.01, rel=1e-3)


# The search


def test_a_size_is_met_and_the_front_is_sound(plain: SearchResult) -> None:
    report = plain.report
    assert report.chosen.bytes <= 6500 < max(point.bytes for point in report.points)
    assert not report.warnings  # the final model is the candidate that was measured, byte for byte
    costs = [point.cost for point in report.front]
    losses = [point.divergence for point in report.front]
    assert costs == sorted(costs)
    assert losses == sorted(losses, reverse=True)
    assert len({group.bits for group in report.groups if not group.tensors and not group.rule}) > 1
    bits = {layer.node: layer.weight_bits for layer in plain.quantization.layers}
    assert all(bits[g.layers[0]] == g.bits for g in report.groups if not g.tensors)


def test_an_interrupted_search_goes_on_to_the_same_bytes(
    plain: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = 0

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int, text: str) -> None:
        nonlocal measured
        measured += text == "candidates"
        if measured == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        lowbit.search(short(), images(), target=SIZE, state=tmp_path, progress=stop, **QUICK)
    result = lowbit.search(short(), images(), target=SIZE, state=tmp_path, **QUICK)
    assert written(result) == written(plain)
    assert result.report.evaluated == plain.report.evaluated - 2
    # A damaged file is measured again; what is whole is not.
    damaged = sorted((next(tmp_path.iterdir()) / "measured").glob("*.json"))[0]
    damaged.write_text("{", encoding="utf-8")
    again = lowbit.search(short(), images(), target=SIZE, state=tmp_path, **QUICK)
    assert again.report.evaluated <= 1
    assert again.report.chosen.widths == plain.report.chosen.widths


def test_a_pool_gives_the_same(plain: SearchResult) -> None:
    result = lowbit.search(short(), images(), target=SIZE, jobs=2, **QUICK)
    assert written(result) == written(plain)


def test_a_cluster_gives_the_same(plain: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterHere()
    monkeypatch.setattr("lowbit.searcher.executor.Cluster", cluster)
    result = lowbit.search(short(), images(), target=SIZE, cluster="somewhere:6379", **QUICK)
    assert {function for function, *_ in cluster.called} == {measure_packed}
    assert written(result) == written(plain)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LowBitError, match=r"lowbit\[cluster\]"):
        lowbit.search(short(), images(4), target=SIZE, cluster="somewhere:6379", **QUICK)


@pytest.mark.parametrize("target", ["size=100B", "latency=1us"])
def test_a_target_that_cannot_be_met_names_the_nearest(target: str, tmp_path: Path) -> None:
    with pytest.raises(LowBitError, match=r"cannot be met with weights of 2, 4, 8 bits; the (small|fast)est"):
        lowbit.search(short(), images(4), tmp_path / "q.onnx", target=target, **QUICK)
    assert not (tmp_path / "q.onnx").exists()


def test_a_drop_beyond_the_limit_is_an_error() -> None:
    b = Builder()
    model = b.model(b.conv(b.node("Relu", [b.conv("x", 4)]), 3))  # no classes: the error itself is the drop
    with pytest.raises(LowBitError, match=r"is met with a drop of .* at best, more than 0%"):
        lowbit.search(model, images(4), target="size=1MB", max_drop="0%", bits=(2,), points=2, tries=0)


def test_a_drop_is_met_with_the_least_bytes() -> None:
    result = lowbit.search(residual(), images(), target="drop=10%", minimize="size", **QUICK)
    assert result.report.chosen.drop <= 0.1
    assert result.report.chosen.bytes < max(point.bytes for point in result.report.points)


@pytest.mark.parametrize("percent", [12, 0.01])
def test_a_drop_between_two_points_is_met_by_single_groups(percent: float) -> None:
    b = Builder(4)
    x = b.conv("x", 4)
    for channels in (8, 8, 4):
        x = b.conv(b.node("Relu", [x]), channels)  # no classes: the error itself is the drop
    given = (b.model(x), images())
    if percent < 1:
        with pytest.raises(LowBitError, match=r"cannot be met with weights of .* the best candidate has"):
            lowbit.search(*given, target=f"drop={percent}%", minimize="size", **QUICK)
        return
    report = lowbit.search(*given, target=f"drop={percent}%", minimize="size", **QUICK).report
    cheaper = [point for point in report.points if point.bytes < report.chosen.bytes]
    assert report.chosen.drop <= percent / 100 < min(point.drop for point in cheaper)


def test_labels_decide_what_a_drop_is() -> None:
    result = lowbit.search(
        short(), images(), target="drop=20%", minimize="size", judge={"x": images(20, seed=9)},
        labels=np.zeros(20, np.int64), **QUICK,
    )  # fmt: skip
    assert result.report.drop_of == "top1"
    assert result.report.judges == 20


def test_a_width_that_is_not_faster_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(network: Any, *_: Any) -> Times:
        made = Times("cpu", 1, {}, {(2, 8): 3.0, (4, 8): 1.0, (8, 8): 2.0})
        for name, layer in network.plan.layers.items():
            free = layer.rule == "asked"
            made.layers[name] = {(2, 8): 0.6, (4, 8): 0.2, (8, 8): 0.4} if free else {(layer.bits, 8): 0.1}
        return made

    monkeypatch.setattr(steps, "measure_times", times)
    monkeypatch.setattr(steps, "measure_model", lambda *_: 1.5)
    result = lowbit.search(short(), images(), target="latency=1.6ms", **QUICK)
    (reason,) = result.report.not_offered
    assert reason.startswith("w2a8 is not faster than more bits in 3 of 3 layers on cpu")
    assert "3 ms with w2a8 and 2 ms with w8a8" in reason
    assert {g.bits for g in result.report.groups if not g.tensors and not g.rule} <= {4, 8}


def test_times_are_measured_on_this_machine() -> None:
    result = lowbit.search(short(), images(4), target="latency=1s", activation_bits=(4, 8), **QUICK)
    report = result.report
    assert report.unit == "ms"
    assert report.latency_ms is not None
    assert report.device == "cpu"


# The command and the page


def test_the_command_and_its_page(tmp_path: Path) -> None:
    onnx.save(short(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", images(6))
    page = tmp_path / "q.html"
    run = CliRunner().invoke(
        cli,
        ["search", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), "--target", SIZE, "--bits",
         "2,4,8", "--calib", str(tmp_path / "x.npy"), "--points", "3", "--tries", "2", "--report", str(page),
         "--format", "json"],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["report"]["target"] == "size=6.5 kB"
    text = page.read_text(encoding="utf-8")
    assert "Pareto front" in text
    assert "<polyline" in text
    assert {each.name for each in tmp_path.iterdir()} == {"m.onnx", "q.html", "q.onnx", "q.yaml", "x.npy"}


def test_the_table_of_the_command(plain: SearchResult, capsys: pytest.CaptureFixture[str]) -> None:
    print_search(Out("table", 1), plain.report, Path("q.onnx"))
    text = capsys.readouterr().out
    assert "Pareto front" in text
    assert all(group.name in text for group in plain.report.groups)
    run = CliRunner().invoke(cli, ["search", "m.onnx", "-o", "q.onnx", "--target", SIZE, "--bits", "two"])
    assert run.exit_code == 2
    assert "expected numbers such as 2,3,4,8, got 'two'" in run.output


def test_names_on_the_page_are_escaped(plain: SearchResult) -> None:
    assert "<script>x" not in render(plain.report, "<script>x")


def test_overrides_name_nodes_exactly() -> None:
    groups = [Group("weights of a.b", ("a.b",), (), (2, 4)), Group("t", ("a.b",), ("t",), (4, 8))]
    made = overrides_of(groups, {"weights of a.b": 2, "t": 4})
    assert made == {r"a\.b": {"weight_bits": 2, "input_bits": 4}}
