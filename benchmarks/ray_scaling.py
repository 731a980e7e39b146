"""What examples/ray_batch.py costs on a Ray cluster of this machine, with more and more workers.

python benchmarks/ray_scaling.py                     1 and 2 workers, and the same work without Ray

Shards of seeded images go through mobilenetv2. All figures are of the second half of the shards, without the
start of Ray and of sessions. On a machine whose cores are busy otherwise the processor times tell more: the
workers' per image says whether more of them cost more for the same work, and that of all else (driver,
scheduler, object store) per shard how many shards a second one driver can hand out. Needs `pip install
'lowbit[cluster]'`.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import ray
from lowbit.inspection.sysinfo import sysinfo
from networks import built, converted
from PIL import Image
from results import ROOT, Table, write

EXAMPLE = ROOT / "examples" / "ray_batch.py"
sys.path.insert(0, str(EXAMPLE.parent))
import ray_batch  # noqa: E402

SAMPLE_SECONDS = 0.2
"""How often processor times are read: what a process uses after the last time before its end is not seen."""


def write_shards(folder: Path, shards: int, images: int) -> None:
    """Shards of JPEG files of 256x256 pixels, with about as much detail as photos have."""
    random = np.random.default_rng(0)
    for shard in range(shards):
        with zipfile.ZipFile(folder / f"{shard:04}.zip", "w") as archive:
            for number in range(images):
                rough, data = random.integers(0, 256, (64, 64, 3), np.uint8), io.BytesIO()
                Image.fromarray(rough).resize((256, 256), Image.Resampling.BICUBIC).save(data, "jpeg")
                archive.writestr(f"{number:04}.jpg", data.getvalue())


def processor_seconds() -> dict[int, tuple[bool, float]]:
    """For each process of Ray and its driver: whether it is a worker, and the time it has used."""
    used = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if words.startswith("ray::") or "/ray/" in words or str(EXAMPLE) in words:
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            used[int(folder.name)] = "ShardWorker" in words, seconds
    return used


def through_ray(model: Path, shards: Path, workers: int, images: int, address: str) -> list[float]:
    """Images a second, processor ms of the workers per image, and of all else per shard.

    All of the second half of the shards, so that no start is counted.
    """
    begun, last, first = None, {}, 0
    half = len(list(shards.iterdir())) // 2
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, str(EXAMPLE), str(model), str(shards), results]
        command += ["--workers", str(workers), "--address", address]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            while run.poll() is None:
                last.update(processor_seconds())
                done = len(list(Path(results).glob("*.parquet")))
                if begun is None and done >= half:
                    begun, first = dict(last), done
                time.sleep(SAMPLE_SECONDS)
        if run.returncode or begun is None:
            raise RuntimeError(f"{shlex.join(command)} ended with {run.returncode}")
        ends = sorted(file.stat().st_mtime for file in Path(results).glob("*.parquet"))
    used = {True: 0.0, False: 0.0}
    for process, (is_worker, seconds) in last.items():
        used[is_worker] += seconds - begun.get(process, (False, 0.0))[1]
    count = len(ends) - first
    rate = count * images / (ends[-1] - ends[first - 1])
    return [rate, 1e3 * used[True] / (count * images), 1e3 * used[False] / count]


def without_ray(model: Path, shards: Path, images: int) -> list[float]:
    """Images a second, and processor ms per image, of the same work in this process."""
    classifier = ray_batch.Classifier(model.read_bytes(), "cpu", 1, 32)
    files = sorted(shards.glob("*.zip"))
    start, before = time.perf_counter(), time.process_time()
    count = sum(1 for file in files for _ in classifier.rows(file))
    assert count == len(files) * images
    return [count / (time.perf_counter() - start), 1e3 * (time.process_time() - before) / count]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,2", help="default: 1,2")
    parser.add_argument("--shards", type=int, default=32, help="default: 32")
    parser.add_argument("--images", type=int, default=64, help="of a shard (default: 64)")
    parser.add_argument("--name", default="ray_scaling", help="name of the results file")
    options = parser.parse_args()
    workers = [int(count) for count in options.workers.split(",")]
    load_before = os.getloadavg()[0]
    ray.init(num_cpus=max(workers), include_dashboard=False, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    model = converted(built("mobilenetv2", "w8a8", batch="N"))
    table = Table("mobilenetv2", ["workers", "images/s", "worker ms an image", "all else ms a shard"])
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder)
        write_shards(shards, options.shards, options.images)
        table.rows.append(["none, without Ray", *without_ray(model, shards, options.images), "-"])
        for count in workers:
            table.rows.append([count, *through_ray(model, shards, count, options.images, address)])
            print(table.markdown(), flush=True)
    ray.shutdown()
    notes = [
        f"{options.shards} shards of {options.images} JPEG files of 256x256 pixels, batches of 32, a thread "
        "in each worker; figures of the second half of them.",
        "worker ms: processor time of the workers per image, decoding and preprocessing included. all else: "
        "that of the driver and of Ray's own processes.",
        f"All processes share {len(os.sched_getaffinity(0))} core(s). The system's load was "
        f"{load_before:.1f} before the run and {os.getloadavg()[0]:.1f} after it.",
    ]
    versions = {**sysinfo()["versions"], "ray": metadata.version("ray")}
    raw = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    write(options.name, "Image shards on a Ray cluster", [table], notes, raw, versions=versions)


if __name__ == "__main__":
    main()
