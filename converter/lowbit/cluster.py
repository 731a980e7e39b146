"""A Ray cluster, for what has an option ``--cluster``. Ray is imported where one is used alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowbit.errors import LowBitError

LOCAL = "local"
"""The address that stands for a cluster of this machine alone, started for one call."""


class Cluster:
    """A cluster that this process has joined, until it is closed.

    Args:
        address: of the cluster's head, as ``ray.init`` takes it, or "local".
        common: what every call gets; sent to each machine once.
        cores: cores that each task takes.
        gpus: GPUs that each task takes.

    Raises:
        LowBitError: if Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str, common: Any, *, cores: int = 1, gpus: int = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise LowBitError("--cluster needs Ray: pip install 'lowbit[cluster]'") from error
        self._ray = ray
        try:
            ray.init(address=None if address == LOCAL else address, log_to_driver=False)
        except Exception as error:  # Ray's own kinds, and those of its transport
            raise LowBitError(f"--cluster {address}: no Ray cluster answers there: {error}") from error
        self._common = ray.put(common)
        self._call = ray.remote(num_cpus=cores, num_gpus=gpus)(_called)

    def each(self, function: Callable[[Any, Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Calls ``function(common, task)`` for each task, somewhere; a call whose machine dies is made again.

        Args:
            function: one that a worker can import.
            tasks: one or several.

        Returns:
            The place of each task and what it came to, as they come.

        Raises:
            LowBitError: the first that a call raises, or for a call that Ray gave up.
        """
        waiting = {self._call.remote(function, self._common, task): i for i, task in enumerate(tasks)}
        while waiting:
            ready, _ = self._ray.wait(list(waiting))
            for reference in ready:
                try:
                    result = self._ray.get(reference)
                except Exception as error:  # Ray's own kinds: memory that ran out, machines that died
                    text = " ".join(str(error).split())
                    raise LowBitError(f"--cluster: a worker failed: {text}") from error
                if isinstance(result, LowBitError):
                    raise result
                yield waiting.pop(reference), result

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()


def _called(function: Callable[[Any, Any], Any], common: Any, task: Any) -> Any:
    """What a worker does. Ray would add its own traceback to an error that is raised; ours are one line."""
    try:
        return function(common, task)
    except LowBitError as error:
        return error
