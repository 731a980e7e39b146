"""examples/serve_triton.py in a running Triton: what it answers and refuses; a reload loses nothing."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lowbit
import numpy as np
import pytest
from lowbit.models import build

from .conftest import EXAMPLES

reason = "NVIDIA Triton is not installed; its step of tools/run_tests.py --full does that in an environment"
pytest.importorskip("pytriton", reason=reason)
import tritonclient.grpc  # noqa: E402
import tritonclient.http  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

MAX_BATCH, MAX_QUEUE = 8, 32
SECONDS = 300.0
"""After which what is waited for does not come any more, on the slowest machine."""
PROTOCOLS = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@dataclasses.dataclass
class Server:
    """A running server, what it prints, and the file that it serves."""

    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    printed: Path
    model: Path

    def client(self, protocol: str):
        return PROTOCOLS[protocol].InferenceServerClient(f"127.0.0.1:{self.ports[protocol]}")

    def wait_for(self, line: str) -> None:
        """Waits until a line that begins so has been printed."""
        end = time.monotonic() + SECONDS
        while not re.search(f"^{line}", self.printed.read_text(), re.MULTILINE):
            assert self.process.poll() is None, self.printed.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)

    def metric(self, name: str) -> float:
        """What Prometheus would read."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['metrics']}/metrics") as page:
            text = page.read().decode()
        (value,) = re.findall(rf'^{name}{{model="model",version="1"}} (\S+)$', text, re.MULTILINE)
        return float(value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model, printed = folder / "model.lowbit.onnx", folder / "printed"
    shutil.copy(converted, model)
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    command = [sys.executable, str(EXAMPLES / "serve_triton.py"), str(model)]
    command += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    command += ["--max-batch", str(MAX_BATCH), "--max-queue", str(MAX_QUEUE), "--delay-us", "2000"]
    with open(printed, "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        running = Server(process, ports, printed, model)
        try:
            running.wait_for("serving")
            yield running
            process.terminate()
            assert process.wait(SECONDS) == 0, printed.read_text()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(MAX_BATCH, 3, 32, 32)).astype(np.float32)


def request(module: ModuleType, x: np.ndarray, name: str = "input", kind: str = "FP32") -> list[object]:
    fed = module.InferInput(name, list(x.shape), kind)
    fed.set_data_from_numpy(x)
    return [fed]


def expected(model: Path, images: np.ndarray) -> np.ndarray:
    return lowbit.session(model).run(None, {"input": images})[0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_server_says_what_a_session_says(
    server: Server, converted: Path, images: np.ndarray, protocol: str
) -> None:
    with server.client(protocol) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("model")
        result = client.infer("model", request(PROTOCOLS[protocol], images)).as_numpy("logits")
    np.testing.assert_array_equal(result, expected(converted, images))


def test_requests_share_runs(server: Server, converted: Path, images: np.ndarray) -> None:
    """What waits becomes one batch, and everyone gets the rows that are theirs."""
    names = ("nv_inference_count", "nv_inference_exec_count")
    before = [server.metric(name) for name in names]
    with server.client("grpc") as client, concurrent.futures.ThreadPoolExecutor(16) as pool:
        single = [images[i % MAX_BATCH : i % MAX_BATCH + 1] for i in range(64)]
        asked = [pool.submit(client.infer, "model", request(tritonclient.grpc, x)) for x in single]
        rows = np.concatenate([future.result().as_numpy("logits") for future in asked])
    np.testing.assert_array_equal(rows, np.tile(expected(converted, images), (8, 1)))
    count, runs = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert count == 64
    assert runs < 64


BAD = {
    "a size": (np.zeros((1, 3, 31, 32), np.float32), "input", "FP32", r"Expected \[-1,3,32,32\]"),
    "a rank": (np.zeros((3, 32, 32), np.float32), "input", "FP32", r"Expected \[-1,3,32,32\]"),
    "a type": (np.zeros((1, 3, 32, 32)), "input", "FP64", "expects 'FP32'"),
    "a name": (np.zeros((1, 3, 32, 32), np.float32), "image", "FP32", "unexpected inference input 'image'"),
    "too many": (np.zeros((MAX_BATCH + 1, 3, 32, 32), np.float32), "input", "FP32", f"<= {MAX_BATCH}"),
    "none": (np.zeros((0, 3, 32, 32), np.float32), "input", "FP32", "byte size mismatch"),
    "100 MB": (np.zeros((1, 3, 2960, 2960), np.float32), "input", "FP32", r"got \[1,3,2960,2960\]"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_told_what_was_expected(server: Server, protocol: str, what: str) -> None:
    x, name, kind, message = BAD[what]
    with server.client(protocol) as client:
        with pytest.raises(InferenceServerException, match=message):
            client.infer("model", request(PROTOCOLS[protocol], x, name, kind))
        good = request(PROTOCOLS[protocol], np.zeros((1, 3, 32, 32), np.float32))
        assert client.infer("model", good).as_numpy("logits").shape == (1, 10)


def test_clients_that_hang_hold_up_nobody(server: Server, converted: Path, images: np.ndarray) -> None:
    """More of them than the server has threads for HTTP, each in the middle of a request."""
    begun = b"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    hanging = []
    try:
        for protocol, data in {"http": begun, "grpc": b"PRI * HTTP/2.0\r\n"}.items():
            for _ in range(32):
                hanging.append(socket.create_connection(("127.0.0.1", server.ports[protocol])))
                hanging[-1].sendall(data)
        for protocol, module in PROTOCOLS.items():
            with server.client(protocol) as client:
                result = client.infer("model", request(module, images)).as_numpy("logits")
            np.testing.assert_array_equal(result, expected(converted, images))
    finally:
        for each in hanging:
            each.close()


def test_a_full_queue_refuses_at_once(server: Server, converted: Path, images: np.ndarray) -> None:
    """While the model stands still so many requests wait as the queue holds; they are answered later."""
    answers: queue.Queue[tuple[object, Exception | None]] = queue.Queue()
    sent = MAX_QUEUE + 20
    with server.client("grpc") as client:
        server.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(sent):
                fed = request(tritonclient.grpc, images)
                client.async_infer("model", fed, lambda result, error: answers.put((result, error)))
            refused = answers.get(timeout=SECONDS)[1]  # nothing else comes while the model stands still
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert "Exceeds maximum queue size" in str(refused)
        got = [answers.get(timeout=SECONDS) for _ in range(sent - 1)]
    results = [result.as_numpy("logits") for result, error in got if error is None]
    assert MAX_QUEUE <= len(results) < sent
    assert all("Exceeds maximum queue size" in str(error) for _, error in got if error is not None)
    for result in results:
        np.testing.assert_array_equal(result, expected(converted, images))


def test_a_reload_loses_no_request(server: Server, images: np.ndarray, tmp_path: Path) -> None:
    """Four clients ask all the time, while another network and two bad ones replace the file."""
    other, narrow = tmp_path / "other.onnx", tmp_path / "narrow.onnx"
    lowbit.convert(build("mobilenetv2", 4, 8, image=32, batch="N", classes=10), other)
    lowbit.convert(build("mobilenetv2", 8, 8, image=32, batch="N", classes=9), narrow)
    old, new = expected(server.model, images), expected(other, images)
    assert not np.array_equal(old, new)
    stopped = threading.Event()

    def ask(protocol: str) -> list[np.ndarray]:
        answers = []
        with server.client(protocol) as client:
            while not stopped.is_set():
                fed = request(PROTOCOLS[protocol], images)
                answers.append(client.infer("model", fed).as_numpy("logits"))
        return answers

    def replace(replacement: Path, told: str) -> None:
        replacement.replace(server.model)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(told)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, protocol) for protocol in ("http", "grpc") * 2]
        try:
            torn = tmp_path / "torn.onnx"
            torn.write_bytes(server.model.read_bytes()[:1000])
            replace(torn, "not reloaded: ")
            replace(narrow, "not reloaded: .*expected .*found")
            replace(other, "reloaded")
            with server.client("grpc") as client:
                after = client.infer("model", request(tritonclient.grpc, images)).as_numpy("logits")
        finally:
            stopped.set()
        answers = [each for future in asking for each in future.result()]
    np.testing.assert_array_equal(after, new)
    from_old = sum(np.array_equal(each, old) for each in answers)
    from_new = sum(np.array_equal(each, new) for each in answers)
    assert from_old > 0
    assert from_old + from_new == len(answers)
