"""Classifies image shards on a Ray cluster; a run that was killed goes on where it stopped.

python examples/ray_batch.py model.lowbit.onnx shards results --workers 8 [--address 10.0.0.1:6379]

A shard is a .zip of some thousand images. It becomes one Parquet file of its name: a row for each image with
its name, its best class and that one's score or, where the image cannot be read, the error. The file gets its
name when it is whole and on disk. So a shard whose worker dies is done again by another one, a new run leaves
out the shards whose files are there, and no image has two rows. Shards and results lie in folders that this
machine and all workers see. How far this goes: docs/serving.md. Needs `pip install 'lowbit[cluster]'`.
"""

import argparse
import glob
import os
import sys
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import pyarrow
import ray
import ray.data
from PIL import Image, ImageOps
from pyarrow import parquet

MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
UNREADABLE = (OSError, ValueError, SyntaxError, zipfile.BadZipFile, Image.DecompressionBombError)
"""What Pillow and zipfile raise for files that are damaged, or no images."""

Row = dict[str, Any]


def preprocessed(image: Image.Image, height: int, width: int) -> np.ndarray:
    """What the network takes, float32 [3, height, width]: yours may want something else."""
    fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BILINEAR)
    return ((np.float32(fitted) / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)


class Classifier:
    """What every worker process holds: one session, and threads that decode images.

    Args:
        model: the bytes of a model with one input [N, 3, height, width] and scores [N, classes].
        device: as `lowbit.session` takes it.
        threads: of the session, and as many that decode.
        batch: images per run of the model.
    """

    def __init__(self, model: bytes, device: str, threads: int, batch: int) -> None:
        self.session = lowbit.session(model, device=device, threads=threads)
        (self.input,) = self.session.get_inputs()
        self.pool, self.batch = ThreadPoolExecutor(threads), batch

    def rows(self, shard: Path) -> Iterator[Row]:
        """A row for each image of a shard, by name; no more than a batch of them is decoded at a time."""
        with zipfile.ZipFile(shard) as archive:
            names = sorted(name for name in archive.namelist() if not name.endswith("/"))
            for start in range(0, len(names), self.batch):
                yield from self._classified(archive, names[start : start + self.batch])

    def _classified(self, archive: zipfile.ZipFile, names: Sequence[str]) -> Iterator[Row]:
        images = list(self.pool.map(lambda name: self._decoded(archive, name), names))
        readable = [image for image in images if not isinstance(image, str)]
        best = iter(self.session.run(None, {self.input.name: np.stack(readable)})[0] if readable else [])
        for name, image in zip(names, images, strict=True):
            if isinstance(image, str):
                yield {"name": name, "class": None, "score": None, "error": image}
            else:
                scores = next(best)
                yield {"name": name, "class": scores.argmax(), "score": scores.max(), "error": None}

    def _decoded(self, archive: zipfile.ZipFile, name: str) -> np.ndarray | str:
        """An image as the network takes it, or why it cannot be read."""
        try:
            with archive.open(name) as file, Image.open(file) as image:
                return preprocessed(image, *self.input.shape[2:])
        except UNREADABLE as error:
            return f"{type(error).__name__}: {error}"


class ShardWorker(Classifier):
    """A classifier as Ray's actors run it: a batch is the path of one shard."""

    def __init__(self, model: ray.ObjectRef, results: str, *settings: Any) -> None:
        super().__init__(ray.get(model), *settings)
        self.results = Path(results)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Writes the file of a shard; tells how many images it has, or why it cannot be read."""
        (shard,) = map(Path, batch["shard"])
        try:
            rows = list(self.rows(shard))
        except UNREADABLE as error:  # those of single images are rows
            told = {"images": 0, "unreadable": 0, "error": f"{type(error).__name__}: {error}"}
        else:
            write(rows, self.results / f"{shard.stem}.parquet")
            unreadable = sum(row["error"] is not None for row in rows)
            told = {"images": len(rows), "unreadable": unreadable, "error": ""}
        return {"shard": batch["shard"], **{key: np.array([value]) for key, value in told.items()}}


SCHEMA = pyarrow.schema(
    [
        ("name", pyarrow.string()),
        ("class", pyarrow.int32()),
        ("score", pyarrow.float32()),
        ("error", pyarrow.string()),
    ]
)


def write(rows: Sequence[Row], target: Path) -> None:
    """Writes rows to a file that has its name only once all of it is on disk.

    Two workers may write the same shard, if Ray took one for dead that was not: each has a file of its own,
    and both say the same. The one that finishes removes what others left unfinished, be they dead or not.
    """
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(unfinished, "wb") as file:
            parquet.write_table(pyarrow.Table.from_pylist(list(rows), SCHEMA), file)
            os.fsync(file.fileno())
        unfinished.replace(target)
    except FileNotFoundError:  # another worker has finished the shard, and removed this file
        if not target.exists():
            raise
    finally:
        unfinished.unlink(missing_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
        left.unlink(missing_ok=True)


def remaining(shards: Path, results: Path) -> list[str]:
    """The shards without a file of results, in the order of their names."""
    done = {file.stem for file in results.glob("*.parquet")}
    return [str(shard) for shard in sorted(shards.glob("*.zip")) if shard.stem not in done]


def main() -> int:
    """Runs what is left to do; 1 where a shard could not be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--address", help="of the cluster; without it one is started on this machine")
    parser.add_argument("--workers", type=int, default=1, help="processes in the cluster (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker (default: 1)")
    parser.add_argument("--batch", type=int, default=32, help="images per run of the model (default: 32)")
    parser.add_argument("--device", default="cpu", help="cuda: a GPU for each worker (default: cpu)")
    options = parser.parse_args()

    options.results.mkdir(parents=True, exist_ok=True)
    todo = remaining(options.shards.absolute(), options.results)
    print(f"{len(todo)} shards to do")
    if not todo:
        return 0
    ray.init(options.address)
    ray.data.DataContext.get_current().enable_progress_bars = False
    model = ray.put(options.model.read_bytes())  # every machine fetches it once
    settings = (options.device, options.threads, options.batch)
    # A block, and so a task, for each shard: what a dead worker had begun is one shard.
    paths = ray.data.from_items([{"shard": path} for path in todo], override_num_blocks=len(todo))
    told = paths.map_batches(
        ShardWorker,
        batch_size=1,
        fn_constructor_args=(model, str(options.results.absolute()), *settings),
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_cpus=options.threads,
        num_gpus=1 if options.device.startswith("cuda") else 0,
    )
    failed = images = 0
    for done, shard in enumerate(told.iter_rows(), 1):
        images += shard["images"]
        failed += bool(shard["error"])
        remark = shard["error"] or f"{shard['images']} images, {shard['unreadable']} of them unreadable"
        print(f"{done}/{len(todo)} {shard['shard']}: {remark}", flush=True)
    print(f"{images} images classified, {failed} shards could not be read")
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Ray 2.60 may crash at an interpreter's end: it frees what its threads still lock
