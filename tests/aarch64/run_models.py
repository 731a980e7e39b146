"""Runs models in sessions and keeps their outputs; for Python on another machine than the tests'.

    python run_models.py PLAN.json

The plan lists what to run: {"model", "device", "feeds", "outputs"}, the last two .npz files; a "source" is
converted into "model" first. Prints facts
about the machine, the packages and who ran the nodes, as JSON in its last line.
"""

from __future__ import annotations

import json
import os
import platform
import sys

import lowbit
import numpy as np
import onnxruntime
from lowbit import _native
from lowbit.sessions.placement import RECORD, assignments


def run(job: dict[str, str]) -> list[int]:
    """Runs one model; returns the sizes of the regions that the execution provider compiled."""
    if "source" in job:
        lowbit.convert(job["source"], job["model"])
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(RECORD, "1")
    session = lowbit.session(job["model"], device=job["device"], threads=2, sess_options=options)
    with np.load(job["feeds"]) as feeds:
        outputs = session.run(None, dict(feeds))
    names = [value.name for value in session.get_outputs()]
    np.savez(job["outputs"], **dict(zip(names, outputs, strict=True)))
    return [len(region) for region in assignments(session)[0]]


def main() -> None:
    """Entry point."""
    with open(sys.argv[1], encoding="utf-8") as file:
        regions = [run(job) for job in json.load(file)]
    facts = {
        "machine": platform.machine(),
        "onnxruntime": onnxruntime.__version__,
        "package": os.path.dirname(lowbit.__file__),
        "version": lowbit.__version__,
        "library": lowbit.get_library_path(),
        "isa": _native.default_isa(),
        "regions": regions,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
