"""Every network of the zoo, quantized in several configurations: does it convert, is it right, is it fast?

python benchmarks/zoo.py                        all networks and configurations; not the commands
python benchmarks/zoo.py --only check           conversion and elements alone; other work may run beside it
python benchmarks/zoo.py --only speed           times alone, on an idle machine
python benchmarks/zoo.py --commands             also every command of `lowbit` on every network
python benchmarks/zoo.py --shard 2/4            one part of four; the last one to end writes the whole table
python benchmarks/zoo.py --quick                ten of them, a minute; exit status 1 for any failure

What is measured is kept per network, configuration and state of the code under `build/zoo/`, so a run that is
stopped goes on where it was. A network runs in a process of its own: one that crashes or hangs is a failure
of that configuration, and the others go on. `--report` writes the table of what there is.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import zoo_packages
import zoo_quantize
from lowbit.errors import LowBitError
from lowbit.frontends.standard_ops import standard_form
from lowbit.measure.bench import Subject, pinned, take_turns
from lowbit.models import zoo
from lowbit.sessions.session import is_ready
from results import ROOT, Cell, Table, write
from zoo_quantize import CONFIGURATIONS, DEFAULT, STOCK_INT8

Record = dict[str, Any]
Array = npt.NDArray[Any]

FOLDER = ROOT / "build" / "zoo"
STAGES = ("check", "speed", "commands")
SLOWER = 1.03
"""A ratio above it counts as slower: what two runs of the same session differ by on an idle machine."""

_MEASURED = ("converter", "custom_ops", "ep", "models", "benchmarks/zoo_quantize.py")
_SECONDS_PER_JOB = 300
_OVER_FLOAT = "over float"  # in the place of a device: the times over those of the float network


# ---- models


def families() -> dict[str, str]:
    """Network -> family; those of packages under the family `packages`."""
    return {**zoo.FAMILIES, **dict.fromkeys(zoo_packages.NETWORKS, "packages")}


class UnusableError(Exception):
    """Stock ONNX Runtime does not quantize or load a model, or a package is not there."""


class Models:
    """The float model of a network and its configurations, built when they are asked for and kept."""

    def __init__(self, network: str) -> None:
        self.network = network
        if network in zoo_packages.NETWORKS:
            try:
                model, shapes = zoo_packages.load(network, FOLDER / "packages")
            except zoo_packages.NotAvailableError as error:
                raise UnusableError(str(error)) from error
        else:
            model, shapes = zoo.build(network)
        self.shapes = shapes
        code = (Path(zoo_quantize.__file__).read_bytes(), ort.__version__.encode())
        data = model.SerializeToString(deterministic=True)
        digest = hashlib.sha256(b"".join([data, *code])).hexdigest()
        self.folder = FOLDER / "models" / network
        mark = self.folder / "digest"
        if not mark.exists() or mark.read_text(encoding="utf-8") != digest:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            onnx.save(model, self.float_path)
            mark.write_text(digest, encoding="utf-8")

    @property
    def float_path(self) -> Path:
        """The float model."""
        return self.folder / "float.onnx"

    def path(self, configuration: str) -> Path:
        """The file of a configuration.

        Raises:
            UnusableError: ONNX Runtime's quantizer fails, or what it writes does not load in ONNX Runtime.
        """
        path = self.folder / f"{configuration}.onnx"
        refusal = path.with_suffix(".refused")
        if refusal.exists():
            raise UnusableError(refusal.read_text(encoding="utf-8"))
        if path.exists():
            return path
        partial = self.folder / "partial" / path.name
        partial.parent.mkdir(exist_ok=True)
        prepared = self.folder / "prepared.onnx"
        try:
            if not prepared.exists():
                zoo_quantize.prepare(self.float_path, prepared)
            zoo_quantize.quantize(self.float_path, prepared, configuration, partial, self.shapes)
        except Exception as error:
            refusal.write_text(f"ONNX Runtime's quantizer: {_one_line(error)}", encoding="utf-8")
            raise UnusableError(refusal.read_text(encoding="utf-8")) from error
        model = onnx.load(partial)
        try:
            options = ort.SessionOptions()
            options.log_severity_level = 4
            stock = ort.InferenceSession(standard_form(model).SerializeToString(), options)
            stock.run(None, zoo_quantize.input_feeds(model, self.shapes, 3))
        except Exception as error:
            refusal.write_text(f"stock ONNX Runtime: {_one_line(error)}", encoding="utf-8")
            raise UnusableError(refusal.read_text(encoding="utf-8")) from error
        partial.rename(path)
        return path

    def feeds(self, path: Path, seed: int) -> dict[str, Array]:
        """Random inputs for one of the files."""
        return zoo_quantize.input_feeds(onnx.load(path), self.shapes, seed)


# ---- check: conversion and elements


def check(network: str, configuration: str) -> Record:
    """Converts a configuration and compares every node on every device."""
    models = Models(network)
    path = models.path(configuration)
    record: Record = {"failures": []}
    failures: list[Record] = record["failures"]
    source = onnx.load(path)
    counted = set(zoo_quantize.counted(source))
    started = time.perf_counter()
    result = _attempt(failures, "convert", lambda: lowbit.convert(path))
    record["convert_s"] = time.perf_counter() - started
    record["quantized"] = len(counted)
    if result is None:
        return record
    report = result.report
    record["nodes"] = dict(collections.Counter(node.action for node in report.nodes))
    kept = [node for node in report.kept if node.name in counted]
    record["kept"] = len(kept)
    record["reasons"] = dict(
        collections.Counter(f"{node.op_type}: {_general(node.reason or '')}" for node in kept).most_common()
    )
    # A conversion that was taken back helps a user; here it is a defect.
    failures += [
        {"step": "convert", "error": warning, "uncaught": False}
        for warning in report.warnings
        if "please report this" in warning
    ]
    two = [models.feeds(path, seed) for seed in (0, 1)]
    data = {name: np.concatenate([feeds[name] for feeds in two]) for name in two[0]}
    for device in _devices():

        def verified(device: str = device) -> Any:
            return lowbit.verify(result, path, data=data, device=device)

        found = _attempt(failures, f"verify {device}", verified)
        if found is None:
            continue
        counters = ("elements", "wrong", "near_tie", "unexplained")
        record[device] = {counter: found.total(counter) for counter in counters}
        record[device]["bad_nodes"] = [
            f"{node.op_type} '{node.name}': {node.wrong} wrong, {node.unexplained} unexplained"
            f" of {node.elements}{f'; {node.note}' if node.note else ''}"
            for node in found.nodes
            if not node.ok
        ]
    return record


def _attempt(failures: list[Record], step: str, function: Callable[[], Any]) -> Any:
    """What the function returns; None, and an entry in `failures`, where it raises."""
    try:
        return function()
    except LowBitError as error:
        failures.append({"step": step, "error": _one_line(error), "uncaught": False})
    except Exception as error:
        said = f"{type(error).__name__}: {_one_line(error)}"
        failures.append({"step": step, "error": said, "uncaught": True})
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _general(reason: str) -> str:
    """A reason without the names and numbers that differ from node to node."""
    reason = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", reason)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", reason)


def _devices() -> list[str]:
    return [device.name for device in lowbit.devices() if device.reason is None]


# ---- speed


def speed(network: str, configuration: str, rounds: int = 4) -> Record:
    """Medians of stock int8, the float network and lowbit on every device, in turns, one thread."""
    models = Models(network)
    path = models.path(configuration)
    stock = models.path(STOCK_INT8) if configuration in zoo_quantize.FEWER_BITS else path
    record: Record = {"failures": []}
    failures: list[Record] = record["failures"]
    converted = models.folder / f"{configuration}.lowbit.onnx"
    converted.unlink(missing_ok=True)
    try:
        lowbit.convert(path, converted)
    except Exception as error:  # the check says so
        raise UnusableError(f"does not convert: {_one_line(error)}") from error
    sources = {"stock": (stock, "cpu"), "float": (models.float_path, "cpu")}
    sources |= {device: (converted, device) for device in _devices()}
    feed = models.feeds(path, 3)
    runs: dict[str, Callable[[], None]] = {}
    for name, (file, device) in sources.items():

        def opened(file: Path = file, device: str = device) -> Callable[[], None]:
            ours = file == converted
            return Subject(str(file), file.stat().st_size, feed, 1, ours, device).bound_run()

        run = _attempt(failures, f"open {name}", opened)
        if run is not None:
            runs[name] = run
    _measure(record, runs, rounds)
    if any(record["ratios"].get(device, 0) > 1 for device in _devices()):
        record["first_ratios"] = record["ratios"]
        _measure(record, runs, 4 * rounds)
    converted.unlink()
    return record


def _measure(record: Record, runs: dict[str, Callable[[], None]], rounds: int) -> None:
    seconds = dict(zip(runs, take_turns(list(runs.values()), rounds), strict=True))
    record["ms"] = {name: float(np.median(times)) * 1e3 for name, times in seconds.items()}
    base = record["ms"].get("stock")
    record["ratios"] = {name: ms / base for name, ms in record["ms"].items() if base and name != "stock"}


# ---- commands


def commands(network: str, configuration: str) -> Record:
    """Every command on one configuration; a command that ends with another exit status is a failure."""
    from click.testing import CliRunner
    from lowbit.cli import cli

    models = Models(network)
    path = models.path(configuration)
    folder = models.folder / "commands"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    converted, samples = folder / "converted.onnx", folder / "samples.npz"
    np.savez(samples, **models.feeds(path, 3))  # type: ignore[arg-type]
    sizes = [f"--shape={name}={','.join(map(str, shape))}" for name, shape in models.shapes.items()]
    calls: dict[str, tuple[list[str], tuple[int, ...]]] = {
        "convert": ([str(path), "-o", str(converted)], (0,)),
        "inspect": ([str(path), *sizes], (0,)),
        "verify": ([str(converted), f"--against={path}", f"--data={samples}"], (0,)),
        "run": ([str(converted), f"--input={samples}"], (0,)),
        "bench": ([str(converted), f"--against={path}", "--rounds=1", *sizes], (0,)),
        # Exit status 3: the target has no words for a node, which the command says.
        "export --to qonnx": ([str(converted), "-o", str(folder / "qonnx.onnx")], (0, 3)),
        "export --to qdq": ([str(converted), "-o", str(folder / "qdq.onnx")], (0, 3)),
    }
    record: Record = {"failures": [], "exit": {}}
    for command, (arguments, expected) in calls.items():
        if command.startswith("export") and not is_ready(onnx.load(converted)):
            expected = (2,)  # nothing was converted, which it says
        done = CliRunner().invoke(cli, [*command.split(), *arguments])
        record["exit"][command] = done.exit_code
        caught = done.exception is None or isinstance(done.exception, SystemExit)
        if done.exit_code not in expected or not caught:
            said = done.output.strip().splitlines()[-3:]
            error = " ".join(said) if caught else f"{type(done.exception).__name__}: {done.exception}"
            record["failures"].append(
                {"step": command, "error": f"exit {done.exit_code}: {error[:500]}", "uncaught": not caught}
            )
            if command == "convert":
                break
    shutil.rmtree(folder)
    return record


RUN: dict[str, Callable[[str, str], Record]] = {"check": check, "speed": speed, "commands": commands}


# ---- jobs: a network's stages and configurations, in a process of its own


def state_key() -> str:
    """A name for the state of the code that is measured: the contents of its files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *_MEASURED],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    digest = hashlib.sha256()
    for name in sorted(set(listed)):
        if (ROOT / name).is_file():
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class State:
    """What was measured of one state of the code."""

    def __init__(self, key: str) -> None:
        self.folder = FOLDER / "state" / key

    def path(self, network: str, stage: str, configuration: str) -> Path:
        """Where a record lies."""
        return self.folder / network / f"{stage}_{configuration}.json"

    def read(self, network: str, stage: str, configuration: str) -> Record | None:
        """A record, if there is one."""
        path = self.path(network, stage, configuration)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, network: str, stage: str, configuration: str, record: Record) -> None:
        """Keeps a record."""
        path = self.path(network, stage, configuration)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(path)


Job = tuple[str, str]  # stage, configuration


def child(network: str, jobs: Sequence[Job], key: str, core: int | None) -> None:
    """Works on a network's jobs; says which one it works on, for the parent that may have to end it."""
    logging.disable(logging.WARNING)
    ort.set_default_logger_severity(4)
    state = State(key)
    running = state.folder / network / "running"
    running.parent.mkdir(parents=True, exist_ok=True)
    for stage, configuration in jobs:
        running.write_text(f"{stage} {configuration}", encoding="utf-8")
        with pinned([core] if stage == "speed" and core is not None else []):
            try:
                record = RUN[stage](network, configuration)
            except UnusableError as error:
                record = {"unusable": str(error), "failures": []}
        state.write(network, stage, configuration, record)
    running.unlink()


def run_network(network: str, jobs: Sequence[Job], state: State, core: int | None) -> None:
    """Runs a network's jobs; a job that ends or blocks its process is a failure, and the rest goes on."""
    pending = list(jobs)
    while pending:
        words = [f"{stage}:{configuration}" for stage, configuration in pending]
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            network,
            "--jobs",
            ",".join(words),
        ]
        command += ["--key", state.folder.name, *([] if core is None else ["--core", str(core)])]
        # A folder of its own: ONNX Runtime's preprocessing leaves files in the current one when it fails.
        with tempfile.TemporaryDirectory() as scratch:
            process = subprocess.Popen(
                command, cwd=scratch, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            try:
                _, said = process.communicate(timeout=_SECONDS_PER_JOB * len(pending))
                why = f"its process ended with {process.returncode}: {' '.join(said.split())[-400:]}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                why = f"no result within {_SECONDS_PER_JOB} s"
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        left = [job for job in pending if state.read(network, *job) is None]
        if left:
            failure = {"step": left[0][0], "error": why, "uncaught": True}
            state.write(network, *left[0], {"failures": [failure]})
            left = left[1:]
        pending = left


# ---- verdicts


def failures_of(stage: str, configuration: str, record: Record) -> list[str]:
    """What is wrong with a record, in words."""
    found = [f"{failure['step']}: {failure['error']}" for failure in record["failures"]]
    for device, counts in record.items():
        if isinstance(counts, dict) and "bad_nodes" in counts:
            found += [f"verify {device}: {node}" for node in counts["bad_nodes"]]
    if stage == "speed" and configuration != "dynamic":
        ratios = record.get("ratios", {}).items()
        slow = [(device, ratio) for device, ratio in ratios if device != "float" and ratio > SLOWER]
        found += [f"{device}: {ratio:.2f} of stock's time" for device, ratio in slow]
    return found


# ---- report


def report(state: State, name: str, networks: Iterable[str], configurations: Sequence[str]) -> int:
    """Writes the table of everything that was measured; returns the number of failures."""
    networks = list(networks)
    main = Table(
        "Networks",
        ["network", "family", "configurations", "quantized nodes converted", "of", "elements", "wrong",
         "unexplained", "near ties", "slowest cpu", "slowest cpu-ep", "cuda", "float", "commands",
         "failures"],
    )  # fmt: skip
    failed = Table("Failures", ["network", "configuration", "what"])
    unusable = Table("Not usable in stock ONNX Runtime", ["network", "configuration", "why"])
    reasons: collections.Counter[str] = collections.Counter()
    where: dict[str, set[str]] = collections.defaultdict(set)
    totals: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in configurations}
    ratios: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    raw: list[Record] = []
    for network in networks:
        family, seen = families()[network], collections.Counter[str]()
        slowest: dict[str, float] = {}
        for configuration in configurations:
            for stage in STAGES:
                record = state.read(network, stage, configuration)
                if record is None:
                    continue
                raw.append({"network": network, "configuration": configuration, "stage": stage, **record})
                if "unusable" in record:
                    if stage == "check":
                        unusable.rows.append([network, configuration, record["unusable"]])
                    continue
                bad = failures_of(stage, configuration, record)
                seen["failures"] += len(bad)
                totals[configuration]["failures"] += len(bad)
                failed.rows += [[network, configuration, _cell(what)] for what in bad]
                if stage == "check":
                    _count(record, seen)
                    _count(record, totals[configuration])
                    if configuration != "dynamic":
                        reasons.update(record.get("reasons", {}))
                        for reason in record.get("reasons", {}):
                            where[reason].add(network)
                seen["commands"] += len(record.get("exit", {}))
                found = record.get("ratios", {})
                if "cpu" in found and "float" in found:
                    ratios[configuration, _OVER_FLOAT].append(found["cpu"] / found["float"])
                for device, ratio in found.items():
                    slowest[device] = max(slowest.get(device, 0.0), ratio)
                    ratios[configuration, device].append(ratio)
        if seen:
            counters = ("converted", "quantized", "elements", "wrong", "unexplained", "near_tie")
            counts = [seen[counter] for counter in counters]
            times: list[Cell] = [slowest.get(d, "") for d in ("cpu", "cpu-ep", "cuda", "float")]
            ends: list[Cell] = [seen["commands"] or "", seen["failures"]]
            main.rows.append([network, family, seen["checked"], *counts, *times, *ends])
    tables = [main, _configurations(totals, ratios), _reasons(reasons, where)]
    tables += [table for table in (failed, unusable) if table.rows]
    notes = [
        f"{len(main.rows)} networks: small ones with seeded weights (`models/zoo`), and those of packages "
        "(`zoo_packages.py`).",
        "Quantized nodes: those that the quantizer put between codes; converted: they run on codes in lowbit "
        "nodes, or are part of one.",
        "Elements: outputs of lowbit nodes, fed what stock ONNX Runtime has there, on all devices together; "
        "wrong: other than the definition; unexplained: other than stock's by more than a tie.",
        "Times: medians over those of stock int8 (of the same file; of `u8s8` for fewer bits), one thread, "
        "in turns, the slowest configuration; measured again, four times as long, where above 1. Over float: "
        "lowbit's time on the CPU over that of the float network.",
        "Commands that were run on u8s8: convert, inspect, verify, run, bench, export to QONNX and to QDQ; "
        "one that ends otherwise than it should is a failure.",
    ]
    write(name, "The zoo", tables, notes, raw)
    return len(failed.rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _count(record: Record, counts: collections.Counter[str]) -> None:
    counts["checked"] += 1
    counts["quantized"] += record.get("quantized", 0)
    counts["converted"] += record["quantized"] - record["kept"] if "kept" in record else 0
    for found in record.values():
        if isinstance(found, dict) and "bad_nodes" in found:
            for counter in ("elements", "wrong", "unexplained", "near_tie"):
                counts[counter] += found[counter]


def _configurations(
    totals: dict[str, collections.Counter[str]], ratios: dict[tuple[str, str], list[float]]
) -> Table:
    table = Table(
        "Configurations",
        ["configuration", "what", "networks", "converted", "share", "wrong", "unexplained", "failures",
         "cpu: median", "cpu: slowest", "cpu-ep: median", "cpu-ep: slowest", "over float: median",
         "over float: slowest"],
    )  # fmt: skip
    for configuration, counts in totals.items():
        if not counts:
            continue
        row: list[Cell] = [configuration, CONFIGURATIONS[configuration], counts["checked"]]
        share = counts["converted"] / counts["quantized"] if counts["quantized"] else 1.0
        row += [f"{counts['converted']} of {counts['quantized']}", f"{share:.1%}"]
        row += [counts["wrong"], counts["unexplained"], counts["failures"]]
        for device in ("cpu", "cpu-ep", _OVER_FLOAT):
            times = ratios.get((configuration, device), [])
            row += [float(np.median(times)), max(times)] if times else ["", ""]
        table.rows.append(row)
    return table


def _reasons(reasons: collections.Counter[str], where: dict[str, set[str]]) -> Table:
    table = Table("Why quantized nodes stay", ["nodes", "networks", "operator: reason", "such as"])
    for reason, count in reasons.most_common():
        table.rows.append([count, len(where[reason]), _cell(reason), sorted(where[reason])[0]])
    return table


# ---- command line


def quick(state: State, count: int, seed: int) -> int:
    """Checks some networks, drawn with their configurations, on all cores; returns the number of failures."""
    rng, cores = random.Random(seed), len(os.sched_getaffinity(0))
    drawn = [(network, rng.choice(DEFAULT)) for network in rng.sample(list(zoo.NETWORKS), count)]

    def checked(job: tuple[str, str]) -> list[str]:
        network, configuration = job
        if state.read(network, "check", configuration) is None:
            run_network(network, [("check", configuration)], state, None)
        record = state.read(network, "check", configuration)
        assert record is not None
        return [f"{network} {configuration}: {what}" for what in failures_of("check", configuration, record)]

    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        bad = [line for lines in pool.map(checked, drawn) for line in lines]
    print("\n".join([*bad, f"{count} of {len(zoo.NETWORKS)} networks, one configuration each, seed {seed}"]))
    return len(bad)


def _chosen(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def main() -> int:
    """Entry point; the exit status is 1 where anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", help="default: all")
    parser.add_argument("--configurations", help=f"default: {','.join(DEFAULT)}; dynamic is another one")
    parser.add_argument("--only", choices=STAGES, help="one stage; speed: u8s8 alone unless stated otherwise")
    parser.add_argument("--commands", action="store_true", help="also every command, on u8s8")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="one of N parts of the networks")
    parser.add_argument("--core", type=int, default=0, help="core that times are measured on (default: 0)")
    parser.add_argument("--again", action="store_true", help="forget what was measured of these")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the table")
    parser.add_argument("--name", default="zoo", help="name of the results files (default: zoo)")
    parser.add_argument("--quick", action="store_true", help="a random selection, conversion and elements")
    parser.add_argument("--count", type=int, default=10, help="networks of --quick (default: 10, a minute)")
    parser.add_argument("--seed", type=int, default=0, help="selection of --quick (default: 0)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    parser.add_argument("--key", help="state of the code to report on (default: the present one)")
    options = parser.parse_args()
    if options.child:
        words = [job.partition(":") for job in options.jobs.split(",")]
        child(options.child, [(stage, name) for stage, _, name in words], options.key, options.core)
        return 0
    state = State(options.key or state_key())
    if options.quick:
        return int(quick(state, options.count, options.seed) > 0)
    known = list(families())
    networks = _chosen(options.networks, known) if options.networks else known
    stages = [options.only] if options.only else ["check", "speed"]
    if options.commands and "commands" not in stages:
        stages.append("commands")
    index, count = map(int, options.shard.split("/"))
    chosen = _chosen(options.configurations, list(CONFIGURATIONS)) if options.configurations else None
    per_stage = {
        "check": chosen or DEFAULT,
        "speed": chosen or ([STOCK_INT8] if options.only == "speed" else DEFAULT),
        "commands": chosen or [STOCK_INT8],
    }
    if not options.report:
        for number, network in enumerate(networks[index - 1 :: count], 1):
            jobs = [(stage, name) for stage in stages for name in per_stage[stage]]
            if options.again:
                for job in jobs:
                    state.path(network, *job).unlink(missing_ok=True)
            jobs = [job for job in jobs if state.read(network, *job) is None]
            began = time.monotonic()
            run_network(network, jobs, state, options.core)
            bad = sum(
                len(failures_of(stage, name, state.read(network, stage, name) or {"failures": []}))
                for stage, name in jobs
            )
            print(
                f"{number:3} {network}: {len(jobs)} jobs, {bad} failures, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return int(report(state, options.name, known, list(CONFIGURATIONS)) > 0)


if __name__ == "__main__":
    sys.exit(main())
