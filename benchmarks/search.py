"""What `lowbit search` wins back: mixed widths beside uniform ones of nearly the same size, or of a latency.

For each network uniform weights of few bits are the baseline. The search may use 1.15 times their bytes, and
gets the calibration images alone, without labels; the evaluation images are read after it is through. What is
evaluated is the converted integer model. With --unlabeled N it runs again on the CIFAR networks, N further
images without labels judging the candidates; rounding sees the same images as before. With --latency it also
looks for 0.75 times the latency of uniform w8a8, measured in turns on one thread. Rows of earlier runs stay
on the page, each with its commit.

With --jobs N networks run side by side, each with its share of N processes; latency is measured after them,
alone. What is finished lies in build/benchmarks/search, by commit: the same command goes on where one was
interrupted.
LOWBIT_SHARED names the folder of models and data.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
from lowbit.errors import LowBitError
from lowbit.proto.feeds import model_inputs
from lowbit.proto.images import load_feeds
from lowbit.proto.model_file import load_proto
from quantizer import NETWORKS, ONE_THREAD, SHARED, keep
from results import RESULTS, WORK, Table, commit_here, write

BYTES = 1.15
LATENCY = 0.75
UNIFORM = {"resnet20": "w2a8", "resnet8": "w2a8", "squeezenet": "w2a8", "mobilenetv2": "w3a8"}
"""The uniform width that each network is compared with."""

UNLABELED = "data/cifar10_train_5000_unlabeled.zip"

STATE = WORK / "search" / commit_here()

WORK_OF = {"resnet20": 3, "resnet8": 2, "squeezenet": 4, "mobilenetv2": 7}
"""How the time of their candidates compares."""


def images_of(name: str, data: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Images as the model reads them."""
    network = NETWORKS[name]
    model = load_proto(SHARED / network.file)
    batches = load_feeds(str(SHARED / data), model_inputs(model), network.preprocess, limit=limit)
    return [{key: np.asarray(array[: batch.count]) for key, array in batch.items()} for batch in batches]


def calibration(name: str) -> list[dict[str, Any]]:
    """The calibration images, as the model reads them."""
    return images_of(name, NETWORKS[name].calib)


def accuracy(name: str, model: Any, against: Any = None) -> Any:
    """Top-1 on the whole evaluation set, and the paired difference to another model's."""
    network = NETWORKS[name]
    data = SHARED / network.eval
    labels = re.sub(r":x$", ":y", str(data)) if ".npz" in network.eval else f"{data}_labels.json"
    report = lowbit.evaluate(
        model, str(data), labels=labels, preprocess=network.preprocess, metric="top1",
        label_offset=network.offset, threads=1, against=against,
    )  # fmt: skip
    return report["top1"]


def won_back(name: str, jobs: int, tries: int, points: int, unlabeled: int = 0) -> dict[str, Any]:
    """Uniform widths, and the search at BYTES times their bytes."""
    feeds = images_of(name, UNLABELED, unlabeled) if unlabeled else []
    judge = {key: np.concatenate([feed[key] for feed in feeds]) for key in feeds[0]} if feeds else None
    path, images, uniform = SHARED / NETWORKS[name].file, calibration(name), UNIFORM[name]
    plain = lowbit.quantize(path, iter(images), bits=uniform, threads=1, convert_to=True)
    assert plain.converted is not None
    weights = sum(layer.bytes for layer in plain.report.layers)
    size = len(plain.converted.SerializeToString(deterministic=True))
    bits = [b for b in (2, 3, 4, 5, 6, 8) if b >= int(uniform[1])]
    found = lowbit.search(
        path, iter(images), target=f"size={size + int((BYTES - 1) * weights)}B", bits=bits, jobs=jobs,
        tries=tries, convert_to=True, state=STATE / name, progress=functools.partial(_tell, name),
        judge=judge, points=points, disable_rules=("ends",),
    )  # fmt: skip
    chosen = found.report.chosen
    assert chosen.weight_bytes <= BYTES * weights, (chosen.weight_bytes, weights)
    fp32 = accuracy(name, path).model.value
    paired = accuracy(name, found.converted, plain.converted)
    before, after = paired.against.value, paired.model.value
    return {
        "network": name, "commit": commit_here(), "unlabeled": unlabeled, "tries": tries, "uniform": uniform,
        "fp32": fp32, "uniform_top1": before, "search_top1": after,
        "won_back": (after - before) / (fp32 - before) if fp32 > before else 1.0,
        "gain_low": paired.difference.low, "gain_high": paired.difference.high, "p": paired.p_value,
        "uniform_bytes": weights, "search_bytes": chosen.weight_bytes,
        "report": {**found.report.to_dict(), "points": [vars(point) for point in found.report.front]},
    }  # fmt: skip


def within_latency(name: str, jobs: int) -> dict[str, Any]:
    """The search at LATENCY times the measured time of uniform w8a8."""
    path, images = SHARED / NETWORKS[name].file, calibration(name)
    state = STATE / f"{name}-latency"
    common = {"bits": (2, 3, 4, 8), "activation_bits": (4, 8), "state": state, "jobs": jobs, "points": 2}
    widest = lowbit.search(path, iter(images), target="latency=1000s", tries=0, **common)
    ms = max(point.cost for point in widest.report.points)
    made = {"network": name, "commit": commit_here(), "w8a8_ms": ms, "not_offered": widest.report.not_offered}
    try:
        found = lowbit.search(
            path, iter(images), target=f"latency={LATENCY * ms:.6f}ms", tries=12, convert_to=True, **common
        )
    except LowBitError as error:
        return {**made, "reason": str(error)}
    return {
        **made, "ms": found.report.latency_ms, "fp32": accuracy(name, path).model.value,
        "top1": accuracy(name, found.converted).model.value, "report": found.report.to_dict(),
    }  # fmt: skip


def _tell(name: str, done: int, total: int, text: str) -> None:
    if text == "candidates":
        print(f"{name}: {done}/{total} {text}", flush=True)


def measured(kind: str, name: str, options: list[str]) -> dict[str, Any]:
    """A row, made in a process of its own, or what an earlier one found with the same options."""
    key = hashlib.sha256(json.dumps([kind, name, options[2:]]).encode()).hexdigest()[:10]
    path = STATE / "rows" / f"{name}_{kind}_{key}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--row", kind, name, str(path), *options]
        subprocess.run(command, check=True, env=ONE_THREAD)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def make_row(kind: str, name: str, path: Path, given: argparse.Namespace) -> None:
    """What :func:`measured` has another process do."""
    if kind == "latency":
        row = within_latency(name, given.jobs)
    else:
        row = won_back(name, given.jobs, given.tries, given.points, given.unlabeled)
    keep(row, path)


def merged(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows, and those of the last results that none of them replaces, in the order of UNIFORM."""
    page = json.loads((RESULTS / "search.json").read_text(encoding="utf-8"))
    known = {(row["network"], row.get("unlabeled", 0)): row for row in page["raw"][kind]}
    known |= {(row["network"], row.get("unlabeled", 0)): row for row in rows}
    return [known[key] for key in sorted(known, key=lambda key: (list(UNIFORM).index(key[0]), key[1]))]


def main() -> None:
    """Measures and writes results/search.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="resnet8,resnet20", help="of " + ",".join(UNIFORM))
    parser.add_argument("--latency", default="resnet20", help="networks to search within a latency")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tries", type=int, default=12)
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--unlabeled", type=int, default=0, help="so many CIFAR images judge in further rows")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        make_row(given.row[0], given.row[1], Path(given.row[2]), given)
        return
    cases = [(name, 0) for name in filter(None, given.networks.split(","))]
    if given.unlabeled:
        cases += [(name, given.unlabeled) for name, _ in cases if "cifar10" in NETWORKS[name].calib]
    work = sum(WORK_OF[name] for name, _ in cases)
    with ThreadPoolExecutor(len(cases) if given.jobs > 1 and cases else 1) as pool:
        waiting = []
        for name, unlabeled in cases:
            share = max(1, given.jobs * WORK_OF[name] // work)
            options = ["--jobs", str(share), "--tries", str(given.tries), "--points", str(given.points),
                       "--unlabeled", str(unlabeled)]  # fmt: skip
            waiting.append(pool.submit(measured, "size", name, options))
    rows = merged("size", [future.result() for future in waiting])
    sizes = Table(
        "Won back at 1.15 times the bytes",
        ["network", "judged on", "fp32", "uniform", "its top-1", "its weights, bytes", "search, top-1",
         "its weights, bytes", "times", "gained, 95 %", "loss won back", "commit"],
        [[r["network"], f"{r['unlabeled']} further images" if r["unlabeled"] else "calibration images",
          r["fp32"], r["uniform"], r["uniform_top1"], r["uniform_bytes"], r["search_top1"],
          r["search_bytes"], r["search_bytes"] / r["uniform_bytes"],
          f"{r['gain_low']:+.3f} .. {r['gain_high']:+.3f}", f"{r['won_back']:.0%}", r["commit"]]
         for r in rows],
    )  # fmt: skip
    names = filter(None, given.latency.split(","))
    timed = merged("latency", [measured("latency", name, ["--jobs", str(given.jobs)]) for name in names])
    times = Table(
        f"Within {LATENCY} times the latency of uniform w8a8, one thread",
        ["network", "w8a8, ms", "result, ms", "top-1", "fp32", "reason", "commit"],
        [[r["network"], r["w8a8_ms"], *(r.get(key, "") for key in ("ms", "top1", "fp32")),
          # Why each width is not offered stands behind it, in the JSON file.
          *r.get("reason", "; ").split("; ")[1:2], r["commit"]] for r in timed],
    )  # fmt: skip
    notes = [
        "Rounding reads the calibration images alone (100 of CIFAR-10, 40 of ImageNet), without labels. Each "
        "half judges what the other one rounded or, where the row says so, further images without labels of "
        "`cifar10_train_5000_unlabeled.zip` do. Top-1 is that of the converted integer model on the whole "
        "evaluation set, read afterwards.",
        "Uniform widths are those of `lowbit quantize` with its rules: first and last layers have 8 bits. "
        "The search chooses those, too (`disable_rules=('ends',)`).",
        "Where no result stands, no mix is as fast as asked; `search.json` says for each width why it is not "
        "offered.",
        "Rows of 3a94975+ were measured on the changes of 0c0a05d while they were made: a large ridge had to "
        "gain 10 instead of 5 %, layers took descent alone, and on ResNet-8 the ends kept 8 bits.",
    ]
    write("search", "Mixed widths beside uniform ones", [sizes, *([times] if timed else [])], notes,
          {"size": rows, "latency": timed})  # fmt: skip


if __name__ == "__main__":
    main()
