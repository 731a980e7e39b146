"""Ctrl-C: one message and exit code 130, within about a second, whatever the process is doing.

SIGTERM and SIGHUP end it alike.

Python runs a handler between two bytecodes of the main thread, so that a long call of native code (a session
that ONNX Runtime opens, a kernel that the tuner measures, a device's compiler) would put it off. A thread
that the signal wakes waits a moment for the ordinary way out and then ends the process itself.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _WORDS[signal.SIGHUP] = "its terminal was closed"

_GRACE_SECONDS = 1.0
"""Time for the main thread to unwind: enough unless it is in native code."""

_said = threading.Lock()


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Makes Ctrl-C, SIGTERM and SIGHUP end the process soon while the body runs; for the main thread.

    A signal that is ignored, as in a script's background jobs, stays ignored.
    """
    waker, woken = socket.socketpair()
    waker.setblocking(False)
    signals = [number for number in _WORDS if signal.getsignal(number) != signal.SIG_IGN]
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # another one would break into the cleaning up that this one begins
            sys.exit(_code(number))

    threading.Thread(target=_watch, args=(woken,), daemon=True).start()
    for number in signals:
        signal.signal(number, stop)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        if received:
            _say(received[0])
        signal.set_wakeup_fd(-1)
        for number in signals:
            signal.signal(number, signal.SIG_DFL)  # what is left is the interpreter's own way out
        waker.close()


def _watch(woken: socket.socket) -> None:
    """Ends the process after a signal that the main thread does not answer, at once after a second one."""
    while number := _next_signal(woken):
        woken.settimeout(_GRACE_SECONDS)
        try:
            if not _next_signal(woken):
                return
        except TimeoutError:
            if _said.locked():  # the main thread is nearly through
                woken.settimeout(None)
                continue
        _say(number)
        atexit._run_exitfuncs()  # they remove temporary files and folders
        os._exit(_code(number))


def _next_signal(woken: socket.socket) -> int:
    """Waits for a signal that ends the process; 0 once there will be none."""
    while received := woken.recv(1):
        if received[0] in _WORDS:
            return received[0]
    return 0


def _say(number: int) -> None:
    """Prints the one message, whoever comes first."""
    if _said.acquire(blocking=False):
        with suppress(OSError):  # nobody may be there to read it
            sys.stderr.write(f"lowbit: {_WORDS[signal.Signals(number)]}\n")
            sys.stderr.flush()


def _code(number: int) -> int:
    """The exit code of a process that a signal ended, as shells have it."""
    return 128 + number
