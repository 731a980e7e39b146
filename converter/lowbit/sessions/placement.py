"""Which nodes of a model the execution provider takes, with which kernels, and why it leaves the others.

ONNX Runtime tells a session's owner who got which node; why not is in the log alone, and the kernels are in
the plan that LOWBIT_PRINT_PLAN prints. Both go to the standard error of the process, so the session is opened
in a process of its own, whose output nobody else writes to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowbit.errors import ModelError, RefusedError, raise_if_out_of_memory

if TYPE_CHECKING:
    import onnxruntime

_LEFT = re.compile(r"lowbit: node '(?P<name>.*?)' \((?P<op>[^()]*)\) stays with ONNX Runtime: (?P<why>.*)")
_STEP = re.compile(r"^  node '(?P<name>.*?)' \([^()]*\).*?: (?P<kernel>.*?), from ", re.MULTILINE)
RECORD = "session.record_ep_graph_assignment_info"
"""The session entry, "1", that :func:`assignments` needs."""

_INFO = 1


@dataclass
class Placement:
    """Where the nodes of a model run.

    Attributes:
        regions: the names of the nodes in each region that the execution provider took.
        reasons: of the nodes that it left, by name.
        elsewhere: names of the nodes of the other providers, ONNX Runtime's own additions (copies) included.
        kernels: of the nodes in regions, by name; of a step of several nodes under the first one's name.
            Empty where sizes are missing, for which nothing can be planned.
    """

    regions: list[list[str]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def taken(self) -> set[str]:
        """The names of all nodes in regions."""
        return {name for region in self.regions for name in region}


def place(path: str, device: str, shapes: Mapping[str, list[int]] | None = None) -> Placement:
    """Opens a converted model on a device, in a new process, and tells where its nodes went.

    Args:
        path: the model.
        device: its name in full.
        shapes: sizes of inputs with symbolic dims, for which kernels are chosen.

    Raises:
        ModelError: if it does not open there.
    """
    command = [sys.executable, "-c", "from lowbit.sessions.placement import child_main; child_main()"]
    arguments = [path, device, json.dumps(dict(shapes or {}))]
    environment = {**os.environ, "LOWBIT_PRINT_PLAN": "1"}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise_if_out_of_memory(RuntimeError(reason))
        reason = (reason.partition(": ")[2] or reason).removeprefix(f"{path}: ")
        message = f"{path}: does not open on device '{device}': {reason}"
        _, refused, said = reason.partition("ONNX Runtime refuses it: ")
        raise RefusedError(message, said) if refused else ModelError(message)
    found = Placement(**json.loads(done.stdout))
    found.reasons, found.kernels = reasons_in(done.stderr), kernels_in(done.stderr)
    return found


def assignments(opened: onnxruntime.InferenceSession) -> tuple[list[list[str]], list[str]]:
    """The names of the nodes in each region, and of those that the other providers run."""
    from lowbit.library import get_ep_name

    regions, elsewhere = [], []
    for subgraph in opened.get_provider_graph_assignment_info():
        names = [str(node.name) for node in subgraph.get_nodes()]
        if subgraph.ep_name == get_ep_name():
            regions.append(names)
        else:
            elsewhere += names
    return regions, elsewhere


def reasons_in(log: str) -> dict[str, str]:
    """Node name -> why it was left, from what the execution provider logs at level INFO."""
    return {found["name"]: found["why"].strip() for found in _LEFT.finditer(log)}


def kernels_in(text: str) -> dict[str, str]:
    """Node name -> kernel, from the plans of regions that LOWBIT_PRINT_PLAN prints."""
    return {found["name"]: found["kernel"] for found in _STEP.finditer(text)}


def child_main() -> None:
    """Runs in the new process: opens the session, prints who got which node as JSON, and runs it once."""
    import onnxruntime

    from lowbit.errors import LowBitError
    from lowbit.proto.feeds import random_feeds
    from lowbit.proto.model_file import load_proto
    from lowbit.sessions.session import session

    path, device, shapes = sys.argv[1:4]
    sess_options = onnxruntime.SessionOptions()
    sess_options.log_severity_level = _INFO
    sess_options.add_session_config_entry(RECORD, "1")
    opened = session(path, device=device, sess_options=sess_options)
    regions, elsewhere = assignments(opened)
    print(json.dumps({"regions": regions, "elsewhere": elsewhere}))
    with contextlib.suppress(LowBitError):  # sizes that nobody gave: placed, but not planned
        opened.run(None, random_feeds(load_proto(path, external_data=False), shapes=json.loads(shapes)))
