"""Who measures candidates: this process, a pool of processes, or a Ray cluster. All give the same numbers."""

from __future__ import annotations

import atexit
import functools
import io
import multiprocessing
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from lowbit.cluster import Cluster
from lowbit.searcher.network import Network, Task

Measured = tuple[int, dict[str, Any]]
"""The place of a task among those given, and what was measured."""


class Executor(Protocol):
    """Measures tasks."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Results as they come, in any order."""

    def close(self) -> None:
        """Ends what it started."""


class Here:
    """This process, one task after the other."""

    def __init__(self, network: Network, state: Path) -> None:
        self.network, self.state = network, state

    def run(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Results in order."""
        return ((i, self.network.measure(task, self.state)) for i, task in enumerate(tasks))

    def close(self) -> None:
        """Nothing was started."""


class Pool:
    """Processes of this machine, which share the folder of finished layers."""

    def __init__(self, folder: Path, state: Path, jobs: int) -> None:
        # A fresh interpreter each: a fork would take over ONNX Runtime's locks without its threads.
        self._pool = ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), initializer=_open, initargs=(folder, state)
        )

    def run(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Results as they come."""
        waiting = {self._pool.submit(_measure, task): i for i, task in enumerate(tasks)}
        return ((waiting[future], future.result()) for future in as_completed(waiting))

    def close(self) -> None:
        """Ends the processes."""
        self._pool.shutdown(cancel_futures=True)


_opened: list[tuple[Network, Path]] = []
"""What a worker process has opened: its one network, and where finished layers lie."""


def _open(folder: Path, state: Path) -> None:
    _opened[:] = [(Network.load(folder), state)]


def _measure(task: Task) -> dict[str, Any]:
    network, state = _opened[0]
    return network.measure(task, state)


class OnCluster:
    """A Ray cluster. Its workers share no folder with this machine: they are sent what lies in it."""

    def __init__(self, folder: Path, state: Path, address: str) -> None:
        self._cluster = Cluster(address, pack(folder, state))

    def run(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Results as they come."""
        return self._cluster.each(measure_packed, tasks)

    def close(self) -> None:
        """Leaves the cluster."""
        self._cluster.close()


def pack(folder: Path, state: Path) -> bytes:
    """Both folders as the bytes of a tar file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, "network")
        archive.add(state, "state")
    return packed.getvalue()


@functools.lru_cache(maxsize=1)
def _unpack(packed: bytes) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lowbit-search-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    _open(folder / "network", folder / "state")


def measure_packed(packed: bytes, task: Task) -> dict[str, Any]:
    """What a worker of a cluster does: it unpacks the folders once, and keeps what it rounds there."""
    _unpack(packed)
    return _measure(task)
