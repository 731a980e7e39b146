"""Measured kernel choices: they change kernels, never results, and their file is never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lowbit
import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from lowbit.cli import cli
from lowbit.measure import tune as tuner

from tests.numerics import random_nodes
from tests.support import require_native
from tests.tools.conftest import qdq_conv

native = require_native()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of the test's own; the file in it may not be there yet."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LOWBIT_TUNE", raising=False)
    return Path(native.tune_cache_path())


@pytest.fixture
def slowest_wins(monkeypatch):
    """Makes the last candidate win by far, so that a test depends on no clock."""

    def race(problem, kernels, report, rounds):
        return np.stack([np.full(rounds, 1.0 / (1 + i)) for i in range(len(kernels))])

    monkeypatch.setattr(tuner, "_race", race)


def small_conv(rng: np.random.Generator, **fixed) -> random_nodes.Node:
    return random_nodes.make("LowBitConv", rng, kind="dense", **fixed)


def plan(node: random_nodes.Node, **options):
    return native.plan(node.op_type, node.attrs, node.inputs, **options)


# ---- what tuning does


def test_a_session_takes_the_measured_kernel_and_computes_the_same(
    source, cache, slowest_wins, monkeypatch, capfd
):
    model = lowbit.convert(source).model
    images = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
    feed = {lowbit.session(model).get_inputs()[0].name: images}
    before = lowbit.session(model, threads=1).run(None, feed)
    report = lowbit.tune(model, threads=1)
    assert cache.is_file()
    assert report.cache == str(cache)
    assert report.changed == len(report.nodes) >= 4
    assert all(node.gain > 1 and node.tuned != node.routed for node in report.nodes)

    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "1")
    capfd.readouterr()
    after = lowbit.session(model, threads=1).run(None, feed)
    printed = capfd.readouterr().err
    for node in report.nodes:
        assert f"'{node.name}' ({node.op_type}): {node.tuned} (measured)" in printed
    assert all((a == b).all() for a, b in zip(before, after, strict=True))

    monkeypatch.setenv("LOWBIT_TUNE", "off")
    lowbit.session(model, threads=1)
    assert "(measured)" not in capfd.readouterr().err
    monkeypatch.delenv("LOWBIT_TUNE")
    options = ort.SessionOptions()
    options.add_session_config_entry("lowbit.tune", "off")
    lowbit.session(model, threads=1, sess_options=options)
    assert "(measured)" not in capfd.readouterr().err


def test_an_unconverted_model_with_open_sizes_is_tuned_too(tmp_path, slowest_wins):
    model = qdq_conv(dynamic=True)
    report = lowbit.tune(model, shapes={"x": [2, 3, 9, 9]}, threads=1)
    assert [node.op_type for node in report.nodes] == ["LowBitConv"]
    text = Path(report.cache).read_text()
    assert "shape=?x?x?" in text
    nodes = lowbit.inspect(model).nodes
    assert [node.kernel for node in nodes if node.tuned] == [report.nodes[0].tuned]


def test_the_estimated_choice_stays_unless_another_one_wins_twice(monkeypatch):
    def race(problem, kernels, report, rounds):
        won = 0.5 if len(kernels) > 2 else 0.99  # the fastest by far, but not in the duel
        return np.stack([np.full(rounds, 1.0 if i == 0 else won) for i in range(len(kernels))])

    monkeypatch.setattr(tuner, "_race", race)
    report = lowbit.tune(qdq_conv(), threads=1)
    assert report.nodes[0].tuned == report.nodes[0].routed
    assert report.nodes[0].gain == 1.0
    assert report.changed == 0


def test_equal_nodes_are_measured_once(source, monkeypatch):
    measured = []

    def race(problem, kernels, report, rounds):
        measured.append(problem.key)
        return np.ones((len(kernels), rounds))

    monkeypatch.setattr(tuner, "_race", race)
    report = lowbit.tune(source, threads=1)
    assert len(measured) == len(set(measured)) == report.problems


def test_real_measurements_are_positive():
    report = lowbit.tune(qdq_conv(), threads=2)
    assert report.threads == 2
    node = report.nodes[0]
    assert node.routed in node.microseconds
    assert all(value > 0 for value in node.microseconds.values())


# ---- what a session makes of the file


@pytest.mark.parametrize("seed", range(6))
def test_no_entry_changes_a_result(seed, cache):
    rng = np.random.default_rng(seed)
    op = ["LowBitConv", "APConv", "LowBitGemm", "APGemm", "LowBitConvTranspose"][seed % 5]
    node = random_nodes.make(op, rng)
    expected = native.run(node.op_type, node.attrs, node.inputs, reference=True)
    routed = plan(node)
    candidates = [candidate["kernel"] for candidate in routed["candidates"]]
    refused = [reason.split(":")[0] for reason in routed["refused"]]
    for kernel in [*candidates[1:4], *refused[:2], "no_such_kernel", "x" * 900]:
        tuner.keep({(routed["tune_key"], 1): kernel})
        chosen = plan(node, threads=1)
        applies = kernel in candidates
        assert chosen["tuned"] is applies
        assert chosen["kernel"] == (kernel if applies else routed["kernel"])
        assert (native.run(node.op_type, node.attrs, node.inputs) == expected).all()


def test_entries_are_for_a_number_of_threads_and_an_instruction_set():
    node = small_conv(np.random.default_rng(0))
    first = plan(node)
    others = [candidate["kernel"] for candidate in first["candidates"][1:]]
    tuner.keep({(first["tune_key"], 2): others[0], (first["tune_key"], 10): others[1]})
    assert plan(node, threads=1)["kernel"] == first["kernel"]
    assert plan(node, threads=2)["kernel"] == others[0]
    assert plan(node)["kernel"] == others[1]  # not known: the most threads
    assert plan(node, threads=2, isa="scalar")["tuned"] is False
    assert plan(node, threads=2, kernel=first["kernel"])["tuned"] is False


def test_keys_tell_apart_what_matters():
    rng = np.random.default_rng(3)
    nodes = [small_conv(rng, x_bits=bits, w_bits=bits) for bits in (1, 2, 4, 8) for _ in range(4)]
    keys = [plan(node)["tune_key"] for node in nodes]
    assert len(set(keys)) == len(keys)
    stated = plan(nodes[0], x_shape=[1, -1, 5, int(nodes[0].attrs["in_channels"])])["tune_key"]
    assert "shape=1x?x5" in stated
    assert "shape=?x?x?" in plan(nodes[0], x_shape=[])["tune_key"]


def test_a_damaged_file_is_ignored_with_one_warning(cache):
    node = small_conv(np.random.default_rng(0))
    key, other = plan(node)["tune_key"], plan(node)["candidates"][1]["kernel"]
    tuner.keep({(key, 1): other})
    good = cache.read_bytes()
    foreign = good.replace(b"\nbuild lowbit ", b"\nbuild lowbit 9.")
    for bad in (good[:-1], good[: len(good) // 2], good + b"x", foreign, b"", b"\0" * 100):
        cache.write_bytes(bad)
        with pytest.warns(RuntimeWarning, match=r"tune-.*ignored.*lowbit tune") as caught:
            assert plan(node, threads=1)["tuned"] is False
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert plan(node, threads=1)["tuned"] is False
    cache.write_bytes(good)
    assert plan(node, threads=1)["kernel"] == other


def test_a_session_says_once_what_is_wrong_with_the_file(converted, cache):
    cache.parent.mkdir()
    cache.write_text("nonsense")
    code = "import sys, lowbit\nprint(lowbit.session(sys.argv[1]).get_providers())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(converted)], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("lowbit tune --clear") == 1
    assert "CPUExecutionProvider" in done.stdout


def test_what_is_no_file_is_ignored(cache):
    node = small_conv(np.random.default_rng(0))
    cache.mkdir(parents=True)
    assert plan(node, threads=1)["tuned"] is False
    cache.rmdir()
    os.mkfifo(cache)  # reading it would wait forever
    assert plan(node, threads=1)["tuned"] is False


# ---- the format

_PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40)
_ENTRIES = st.dictionaries(st.tuples(_PRINTABLE, st.integers(1, 1024)), _PRINTABLE, max_size=8)


@given(_ENTRIES)
def test_what_is_written_is_read(entries):
    text = native.format_tune_cache([(*key, kernel) for key, kernel in entries.items()])
    assert {(key, threads): kernel for key, threads, kernel in native.parse_tune_cache(text)} == entries


@given(st.data())
def test_hostile_bytes_are_refused(data):
    """Every change of a valid text is noticed; nothing else than a clear error ever comes out."""
    text = native.format_tune_cache([("conv a", 1, "kernel_a"), ("conv b", 16, "kernel_b")])
    change = data.draw(st.sampled_from(["flip", "cut", "insert", "swap", "anything"]))
    at = data.draw(st.integers(0, len(text) - 1))
    some = data.draw(st.binary(min_size=1, max_size=20))
    changed = {
        "flip": text[:at] + bytes([text[at] ^ some[0]]) + text[at + 1 :],
        "cut": text[:at],
        "insert": text[:at] + some + text[at:],
        "swap": text[at:] + text[:at],
        "anything": data.draw(st.binary(max_size=400)),
    }[change]
    if changed == text:
        return
    with pytest.raises(native.LowBitError, match=r"tune cache|another machine|damaged|line"):
        native.parse_tune_cache(changed)


def with_checksum(body: bytes, count: int) -> bytes:
    """A file whose checksum is right, whatever it holds."""
    value = 0xCBF29CE484222325
    for byte in body:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    empty = native.format_tune_cache([])
    return empty[: empty.index(b"entries")] + b"entries %d, checksum %016x\n" % (count, value) + body


@pytest.mark.parametrize(
    "body",
    [
        b"1\tkey\tkernel",  # no end of line
        b"1\tkey\n",
        b"\tkey\tkernel\n",
        b"0\tkey\tkernel\n",
        b"-1\tkey\tkernel\n",
        b"99999999999999999999\tkey\tkernel\n",
        b"1 \tkey\tkernel\n",
        b"1\t\tkernel\n",
        b"1\tkey\t\n",
        b"1\tkey\tkernel\tmore\n",
        b"1\tkey\tkern\xffel\n",
        b"1\tk\0y\tkernel\n",
        b"1\tkey\t" + b"x" * 1001 + b"\n",
        b"1\tkey\tkernel\n\n",
        b"1\tkey\tkernel\n1\tkey\tkernel\n",  # two lines, one entry
    ],
)
def test_lines_are_checked_though_the_checksum_is_right(body):
    with pytest.raises(native.LowBitError, match=r"line|damaged"):
        native.parse_tune_cache(with_checksum(body, max(body.count(b"\n"), 1)))


def test_the_checksum_of_these_tests_is_the_real_one():
    assert native.parse_tune_cache(with_checksum(b"7\tkey\tkernel\n", 1)) == [("key", 7, "kernel")]


@pytest.mark.parametrize(
    "entry", [("", 1, "k"), ("a\tb", 1, "k"), ("a", 1, "k\n"), ("a", 0, "k"), ("é", 1, "k")]
)
def test_what_the_format_cannot_hold_is_not_written(entry):
    with pytest.raises(native.LowBitError, match="does not fit the format"):
        native.format_tune_cache([entry])


# ---- writing it


def test_entries_of_several_writers_at_once_all_stay(cache):
    """Locks belong to open files, so threads stand for processes here."""

    def write(writer: int) -> None:
        for i in range(10):
            tuner.keep({(f"{writer} {i}", 1): "kernel"})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(native.parse_tune_cache(cache.read_bytes())) == 40
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_damaged_file_is_replaced(cache):
    cache.parent.mkdir()
    cache.write_text("nonsense")
    assert any("old entries are lost" in text for text in tuner.keep({("key", 1): "kernel"}))
    assert native.parse_tune_cache(cache.read_bytes()) == [("key", 1, "kernel")]


def test_a_full_disk_leaves_the_old_file_and_one_error(cache):
    tuner.keep({("key", 1): "kernel"})
    before = cache.read_bytes()
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\n"
        "from lowbit.measure import tune as tuner\n"
        "try: tuner.keep({(f'key {i}', 1): 'kernel' for i in range(100)})\n"
        "except tuner.OutputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "cannot be written" in done.stdout
    assert cache.read_bytes() == before
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path, monkeypatch, slowest_wins):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(lowbit.OutputError, match="LOWBIT_CACHE_DIR"):
        lowbit.tune(qdq_conv(), threads=1)


def test_without_any_folder_sessions_run_and_tune_says_what_to_set(monkeypatch, converted):
    for name in ("LOWBIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert native.tune_cache_path() == ""
    lowbit.session(converted)
    with pytest.raises(lowbit.LowBitError, match="LOWBIT_CACHE_DIR"):
        lowbit.tune(converted)
    monkeypatch.setenv("HOME", "/home/someone")
    assert native.tune_cache_path().startswith("/home/someone/.cache/lowbit/tune-")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    assert native.tune_cache_path().startswith("/home/someone/.cache/lowbit/tune-")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert native.tune_cache_path().startswith("/elsewhere/lowbit/tune-")


# ---- the command


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(cli, ["tune", *map(str, arguments)])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def test_the_command_prints_every_node(converted, slowest_wins, cache):
    report = json.loads(run(converted, "--threads", 1, "--format", "json").stdout)
    assert report["changed"] == len(report["nodes"]) > 0
    assert report["cache"] == str(cache)
    table = run(converted, "--threads", 1)
    for node in report["nodes"]:
        assert node["name"] in table.stdout
        assert node["tuned"] in table.stdout
    assert "get another kernel" in table.stderr


def test_clear_forgets_what_all_builds_measured(converted, slowest_wins, cache):
    run(converted, "--threads", 1)
    other = cache.with_name("tune-0123456789abcdef.txt")
    other.write_text("of another build")
    assert json.loads(run("--clear", "--format", "json").stdout)["removed"] == sorted(
        [str(cache), str(other)]
    )
    assert not list(cache.parent.iterdir())
    assert "nothing" in run("--clear").stderr


def test_choices_that_nobody_takes_are_told(converted, slowest_wins, monkeypatch):
    monkeypatch.setenv("LOWBIT_TUNE", "off")
    report = lowbit.tune(converted)
    assert "LOWBIT_TUNE is off: sessions do not take measured choices" in report.warnings


def test_wrong_usage_is_one_line(tmp_path):
    assert "--clear" in run(code=2).stderr
    assert "no such file" in run(tmp_path / "missing.onnx", code=2).stderr
