"""A Ray cluster, for what has an option ``--cluster``. Only the process that joins one imports Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from lowbit.errors import LowBitError

LOCAL = "local"
"""The address that stands for a cluster of this machine alone, started for one call."""

_PATIENCE = 10
"""Seconds that a process may take to leave a cluster."""


class Cluster:
    """A cluster that a process of this one's has joined, until it is closed.

    It is a process of its own, because Ray 2.60 cannot be left safely: `ray.shutdown` destroys an event loop
    whose mutex a thread of Ray's may lock afterwards, to answer a request for objects of the process
    (`ServerCallImpl::SendReply` of `PubsubLongPolling`), which overwrites whatever lies there by then.

    Args:
        address: of the cluster's head, as ``ray.init`` takes it, or "local".
        common: what every call gets, which can be pickled; sent to each machine once.
        cores: cores that each task takes.
        gpus: GPUs that each task takes.

    Raises:
        LowBitError: if Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str, common: Any, *, cores: int = 1, gpus: int = 0) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LowBitError("--cluster needs Ray: pip install 'lowbit[cluster]'")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, address, common, cores, gpus), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._received()
        except BaseException:
            self.close()
            raise

    def each(self, function: Callable[[Any, Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Calls ``function(common, task)`` for each task, somewhere; a call whose machine dies is made again.

        Args:
            function: one that a worker can import.
            tasks: one or several.

        Returns:
            The place of each task and what it came to, as they come: all of them are to be taken.

        Raises:
            LowBitError: the first that a call raises, or for a call that Ray gave up.
        """
        self._connection.send((function, tasks))
        for _ in tasks:
            yield self._received()

    def close(self) -> None:
        """Leaves the cluster."""
        self._process.terminate()
        self._process.join(_PATIENCE)
        self._process.kill()  # where Ray hangs
        self._process.join()
        self._connection.close()

    def _received(self) -> Any:
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise LowBitError(
                f"--cluster: the process that had joined the cluster ended with {self._process.exitcode}; "
                "what it printed, or else Ray's logs, say why"
            ) from error
        if isinstance(result, LowBitError):
            raise result
        return result


def _serve(connection: Connection, address: str, common: Any, cores: int, gpus: int) -> None:
    """What the process that joins the cluster does: it has tasks done until the caller ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's to handle, who then closes the cluster
    signal.signal(signal.SIGTERM, _leave)
    # Where the connection is at its end, the caller has died.
    with contextlib.suppress(SystemExit, EOFError, BrokenPipeError, ConnectionResetError):
        try:
            for result in _results(connection, address, common, cores, gpus):
                connection.send(result)
        except LowBitError as error:
            connection.send(error)
            connection.recv()
    if address == LOCAL:
        import ray

        ray.shutdown()  # ends the processes that it has started; nothing is lost if this one crashes now
    os._exit(0)  # at an interpreter's end Ray calls that function, too


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit()


def _results(connection: Connection, address: str, common: Any, cores: int, gpus: int) -> Iterator[Any]:
    """None once the cluster is joined; then, for what the caller asks, the place and result of each task."""
    import ray

    try:
        ray.init(address=None if address == LOCAL else address, log_to_driver=False)
    except Exception as error:  # Ray's own kinds, and those of its transport
        raise LowBitError(f"--cluster {address}: no Ray cluster answers there: {error}") from error
    signal.signal(signal.SIGTERM, _leave)  # Ray has put a handler in its place that prints its stack
    yield None
    common = ray.put(common)
    call = ray.remote(num_cpus=cores, num_gpus=gpus)(_called)
    while True:
        function, tasks = connection.recv()
        waiting = {call.remote(function, common, task): i for i, task in enumerate(tasks)}
        while waiting:
            ready, _ = ray.wait(list(waiting))
            for reference in ready:
                try:
                    result = ray.get(reference)
                except Exception as error:  # Ray's own kinds: memory that ran out, machines that died
                    text = " ".join(str(error).split())
                    raise LowBitError(f"--cluster: a worker failed: {text}") from error
                if isinstance(result, LowBitError):
                    raise result
                yield waiting.pop(reference), result


def _called(function: Callable[[Any, Any], Any], common: Any, task: Any) -> Any:
    """What a worker does. Ray would add its own traceback to an error that is raised; ours are one line."""
    try:
        return function(common, task)
    except LowBitError as error:
        return error
