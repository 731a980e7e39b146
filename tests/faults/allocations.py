"""Every allocation of lowbit's libraries fails once: a session's life ends with a status, or goes on and is
right.

`python -m tests.faults.allocations` makes each allocation fail by itself, and each with all that come after
it, in a process of its own each time, which takes hours. `--way`, `--first` and `--every` choose less.
`--together` has many lives in each process, one after the other, and makes each allocation fail that a life
makes behind another one: all but what a process makes once. `--report` writes
benchmarks/results/fault_injection.md and .json, where what is not run stays what it was. A process that dies
or does not end, a wrong element, an error that does not speak of memory, and a block that is left alive are
failures.

A life is what an application does: register the library, open a session, run it, destroy all of it. After
those that met no memory there is one more in the same process, which must be right and leave nothing behind.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "custom ops": "RegisterCustomOps, a session, a run, their end",
    "cpu-ep": "the execution provider on the CPU: registered, a session, a run, all released",
    "compile": "the same with a model that is compiled first (EPContext), and opened then",
    "device": "the execution provider on a device with memory and streams of its own (the fake one)",
    "convert": "the Python module: a model converted",
}
"""The lives of which every allocation fails, and what they consist of."""
SAID = (
    "out of memory",
    "is not compatible with any execution provider added to the session",
    "Must provide one or more OrtEpDevice instances",
)
"""In errors of ONNX Runtime. The second is what it says of a compiled model where the provider could not even
tell which nodes it takes, an error that it logs; the third where there was no memory to offer the device."""
PATIENCE = 60  # seconds for the lives of a process, of which one takes less than half
TOGETHER = 25  # lives of a process


def injector() -> Path | None:
    """The library that is preloaded; None where it is not built (-DLOWBIT_TESTS=ON)."""
    named = os.environ.get("LOWBIT_FAULTS")
    found = [Path(named)] if named else sorted(ROOT.glob("build*/**/liblowbit_faults.so"))
    return max((path for path in found if path.is_file()), key=lambda p: p.stat().st_mtime, default=None)


# ---- in the process whose libraries meet no memory


class Faults:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("Disarm", "Alive"):
            getattr(self._library, f"LowBitFaults{name}").restype = ctypes.c_int64

    def watch(self, library: str) -> None:
        """Allocations of a loaded library are counted and may fail."""
        if not self._library.LowBitFaultsWatch(library.encode()):
            raise SystemExit(f"{library} is not loaded")

    def arm(self, at: int, *, and_later: bool) -> None:
        self._library.LowBitFaultsArm(ctypes.c_int64(at), int(and_later))

    def disarm(self) -> int:
        """How many allocations there were since they were armed."""
        return int(self._library.LowBitFaultsDisarm())

    def alive(self) -> int:
        """Blocks of the watched libraries."""
        return int(self._library.LowBitFaultsAlive())


@dataclasses.dataclass
class Life:
    """What happens between an application's first call and its last."""

    live: Callable[[], Any]
    libraries: list[Path]
    expected: Any


def life_of(way: str) -> Life:
    """Everything but the libraries is loaded and made before; what `live` returns is what is expected."""
    import lowbit
    import numpy as np
    import onnx
    import onnxruntime as ort

    from tests.ep.graphs import bottleneck, images

    ort.set_default_logger_severity(4)
    model = bottleneck(0).SerializeToString()
    feeds = {"x": images(1, 3, 6, 7)}
    library = lowbit.get_library_path()

    def options() -> ort.SessionOptions:
        made = ort.SessionOptions()
        made.intra_op_num_threads = made.inter_op_num_threads = 1
        made.log_severity_level = 4
        return made

    def run(chosen: ort.SessionOptions, opened: bytes) -> list[np.ndarray]:
        session = ort.InferenceSession(opened, chosen, enable_fallback=0)
        return [np.array(y) for y in session.run(None, feeds)]

    def custom_ops() -> list[np.ndarray]:
        chosen = options()
        chosen.register_custom_ops_library(library)
        return run(chosen, model)

    def on_provider(use: Callable[[ort.SessionOptions], Any], device: str = "cpu") -> Any:
        ort.register_execution_provider_library("lowbit_faults", library)
        failed = answer = None
        try:
            chosen = options()
            wanted = [d for d in ort.get_ep_devices() if d.ep_metadata.get("device") == device]
            chosen.add_provider_for_devices(wanted, {})
            answer = use(chosen)
        except Exception as error:
            failed = error.with_traceback(None)  # its frames hold what has to end before the library
        del chosen
        gc.collect()
        ort.unregister_execution_provider_library("lowbit_faults")
        if failed is not None:
            raise failed
        return answer

    def compiled() -> list[np.ndarray]:
        def use(chosen: ort.SessionOptions) -> list[np.ndarray]:
            compiler = ort.ModelCompiler(chosen, model, embed_compiled_data_into_model=True)
            return run(chosen, compiler.compile_to_bytes())

        return on_provider(use)

    def convert() -> bytes:
        return lowbit.convert(onnx.load(ROOT / "models/digits/digits_w2a2.onnx")).model.SerializeToString()

    if way == "convert":
        import lowbit._native

        return Life(convert, [Path(lowbit._native.__file__)], convert())
    expected = in_child(custom_ops)
    if way == "custom ops":
        return Life(custom_ops, [Path(library)], expected)
    if way == "compile":
        return Life(compiled, [Path(library)], expected)
    libraries, device = [Path(library)], "cpu"
    if way == "device":
        from tests.ep.conftest import fake_library

        libraries.append(fake_library())
        os.environ["LOWBIT_CUDA_LIBRARY"] = str(libraries[1])
        device = "fake:0"
    return Life(lambda: on_provider(lambda chosen: run(chosen, model), device), libraries, expected)


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own, so that this one stays as it is; no answer is an error."""
    import pickle

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            answer = pickle.dumps(work())
            with os.fdopen(writer, "wb") as file:
                file.write(answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        if not select.select([file], [], [], PATIENCE)[0]:
            os.kill(child, signal.SIGKILL)
        answer = file.read()
    status = os.waitpid(child, 0)[1]
    if status != 0:
        raise ChildProcessError(f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    return pickle.loads(answer)


def watched(life: Life) -> Faults:
    """The preloaded library, with an eye on those of a life."""
    faults = Faults()
    for library in life.libraries:
        ctypes.CDLL(str(library))
        faults.watch(library.name)
    return faults


def lived(life: Life, at: int, and_later: bool, times: int = 1) -> tuple[str, int, int]:
    """What becomes of a life whose `at`th allocation fails, how many it has, what is alive after it."""
    faults = watched(life)
    for _ in range(times):
        verdict, count = lived_once(life, faults, at, and_later)
        verdict = life_after(life) or verdict
    return verdict, count, faults.alive()


def lived_together(life: Life, numbers: list[int]) -> tuple[list[str], int]:
    """What becomes of lives behind a first one, in which these allocations fail; how many the last has."""
    faults = watched(life)
    lived_once(life, faults, 0, False)
    for _ in range(2):  # what is made once, when something fails for the first time, is no leak
        alive = faults.alive()
        told = [lived_once(life, faults, at, False) for at in numbers]
        left = faults.alive() - alive
        if left <= 0:
            break
    verdicts = [verdict for verdict, _ in told]
    if left > 0:
        verdicts[-1] = f"FAILED: {left} blocks are left"
    verdicts[-1] = life_after(life) or verdicts[-1]
    return verdicts, told[-1][1]


def lived_once(life: Life, faults: Faults, at: int, and_later: bool) -> tuple[str, int]:
    """The verdict on a life that meets no memory, and its allocations."""
    from lowbit.errors import is_out_of_memory

    faults.arm(at, and_later=and_later)
    try:
        verdict = "right" if same(life.live(), life.expected) else "FAILED: a wrong element"
    except Exception as error:
        of_memory = is_out_of_memory(error) or any(text in str(error) for text in SAID)
        verdict = "refused" if of_memory else f"FAILED: {type(error).__name__}: {error}"
        error.__traceback__ = None
    count = faults.disarm()
    gc.collect()
    return verdict, count


def life_after(life: Life) -> str | None:
    """What is wrong with a life that has memory, behind those that had none."""
    try:
        return None if same(life.live(), life.expected) else "FAILED: a wrong element in the life after"
    except Exception as error:
        return f"FAILED: the life after: {error}"
    finally:
        gc.collect()


def same(a: Any, b: Any) -> bool:
    """Whether two lives ended with the same elements, or bytes."""
    if isinstance(b, bytes):
        return bool(a == b)
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def work(way: str, first: int, every: int, together: bool) -> None:
    """Prints one line of JSON about the allocations of a life, and one about each of those that failed."""
    life = life_of(way)
    gc.freeze()
    (work_together if together else work_alone)(life, first, every)


def work_alone(life: Life, first: int, every: int) -> None:
    """Each life in a process of its own."""
    verdict, count, alive = in_child(lambda: lived(life, 0, False))
    tell(allocations=count, verdict=verdict)
    for at in range(first, count + 1, every):
        for and_later in (False, True):
            try:
                verdict, _, left = in_child(lambda at=at, later=and_later: lived(life, at, later))
            except ChildProcessError as error:
                verdict, left = f"FAILED: {error}", alive
            if left > alive:
                # What is made once, when something fails for the first time, is no leak.
                _, _, again = in_child(lambda at=at, later=and_later: lived(life, at, later, times=2))
                if again > left:
                    verdict = f"FAILED: blocks are left, {left} and then {again}; {alive} of good lives"
            tell(at=at, and_later=and_later, verdict=verdict)


def work_together(life: Life, first: int, every: int) -> None:
    """Many lives in a process, and again one by one where something is wrong with them."""

    def lives(numbers: list[int]) -> list[str]:
        try:
            verdicts, _ = in_child(lambda: lived_together(life, numbers))
        except ChildProcessError as error:
            verdicts = [f"FAILED: {error}"] * len(numbers)
        if len(numbers) == 1 or not any(verdict.startswith("FAILED") for verdict in verdicts):
            return verdicts
        return [verdict for number in numbers for verdict in lives([number])]

    (verdict,), count = in_child(lambda: lived_together(life, [0]))
    tell(allocations=count, verdict=verdict)
    numbers = [*range(first, count + 1, every)]
    for begin in range(0, len(numbers), TOGETHER):
        part = numbers[begin : begin + TOGETHER]
        for at, verdict in zip(part, lives(part), strict=True):
            tell(at=at, verdict=verdict)


def tell(**what: Any) -> None:
    """A line of JSON for the process that waits."""
    print(json.dumps(what), flush=True)


# ---- the command


@dataclasses.dataclass
class Tally:
    """What became of the lives of one way."""

    way: str
    first: int
    every: int
    together: bool = False
    allocations: int = 0
    verdicts: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)


def tried(way: str, *, first: int = 1, every: int = 1, together: bool = False) -> Tally:
    """Lives of `way` in which the allocations `first`, `first + every` ... fail."""
    library = injector()
    if library is None:
        raise SystemExit("liblowbit_faults is not built: configure with -DLOWBIT_TESTS=ON")
    command = [sys.executable, "-m", "tests.faults.allocations", "--work", way]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    tally = Tally(way, first, every, together)
    done = subprocess.Popen(
        [*command, "--first", str(first), "--every", str(every), *(["--together"] if together else [])],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.stdout is not None
    for line in done.stdout:
        told = json.loads(line)
        verdict = told["verdict"]
        tally.allocations = told.get("allocations", tally.allocations)
        if "at" in told:
            tally.verdicts[verdict.split(":")[0]] += 1
        if verdict.startswith("FAILED"):
            how = "and later ones" if told.get("and_later") else "alone"
            tally.failures.append(f"{way}, allocation {told.get('at', 'none')} {how}: {verdict}")
            print(tally.failures[-1], flush=True)
    if done.wait() != 0:
        tally.failures.append(f"{way}: the process ended with status {done.returncode}")
    return tally


def report(tallies: list[Tally]) -> None:
    """benchmarks/results/fault_injection.md and .json."""
    from benchmarks import results

    of = {(tally.way, tally.together): tally for tally in tallies}
    file = results.RESULTS / "fault_injection.json"
    for known in json.loads(file.read_text())["raw"] if file.exists() else []:
        tally = Tally(**{**known, "verdicts": Counter(known["verdicts"])})
        of.setdefault((tally.way, tally.together), tally)
    named = ("what lives", "in a process", "allocations", "which fail", "lives")
    table = results.Table("Lives", [*named, "refused", "right", "failed"])
    for tally in (of[way, together] for way in WAYS for together in (False, True) if (way, together) in of):
        counts = [tally.verdicts[verdict] for verdict in ("refused", "right", "FAILED")]
        which = "each" if tally.every == 1 else f"number {tally.first}, then every {tally.every}th"
        process = "behind others" if tally.together else "of its own"
        table.rows.append([WAYS[tally.way], process, tally.allocations, which, sum(counts), *counts])
    notes = [
        "An allocation of lowbit's libraries fails by itself, and in a process of its own in another life "
        "with all that come after it. A life ends with an error that speaks of memory (refused), or goes on "
        "without (right). Behind others a life makes anew all but what a process makes once.",
        "Failed: a process that died or did not end, a wrong element then or in the life after, another "
        "error, a block of lowbit's left alive.",
        *(failure for tally in of.values() for failure in tally.failures),
    ]
    raw = [{**vars(tally), "verdicts": dict(tally.verdicts)} for tally in of.values()]
    results.write("fault_injection", "Allocations that fail", [table], notes, raw)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--way", action="append", choices=WAYS, help="only these lives")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="many lives in each process")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.first, given.every, given.together)
        return 0
    tallies = []
    for way in given.way or WAYS:
        tallies.append(tried(way, first=given.first, every=given.every, together=given.together))
        print(f"{way}: {tallies[-1].allocations} allocations, {dict(tallies[-1].verdicts)}", flush=True)
        if given.report:  # after each way, so that a campaign that is stopped keeps what it tried
            report(tallies)
    return int(any(tally.failures for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
