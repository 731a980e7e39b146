"""Which nodes of a model the execution provider takes, with which kernels, and why it leaves the others.

ONNX Runtime tells a session's owner who got which node. Why not, and the kernels, are what
``LOWBIT_PRINT_PLAN=json`` prints on the standard error of the process, so the session is opened in a process
of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowbit.errors import ModelError, RefusedError, raise_if_out_of_memory
from lowbit.library import require_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

RECORD = "session.record_ep_graph_assignment_info"
"""The session entry, "1", that :func:`assignments` needs."""

_PRINTED = '{"lowbit": '
"""How each line begins that ``LOWBIT_PRINT_PLAN=json`` prints."""


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
    environment = {**os.environ, "LOWBIT_PRINT_PLAN": "json"}
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
    found.reasons, found.kernels = reasons_and_kernels(done.stderr)
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


def reasons_and_kernels(printed: str) -> tuple[dict[str, str], dict[str, str]]:
    """Reads what ``LOWBIT_PRINT_PLAN=json`` prints, among whatever else is printed.

    Returns:
        Node name -> why it was left; and node name -> kernel, of a step of several nodes under the first
        one's name.
    """
    reasons: dict[str, str] = {}
    kernels: dict[str, str] = {}
    for line in printed.splitlines():
        if not line.startswith(_PRINTED):
            continue
        told = json.loads(line)
        if told["lowbit"] == "left":
            reasons[told["name"]] = told["reason"]
        elif told["lowbit"] == "region":
            kernels.update((step["nodes"][0], step["kernel"]) for step in told["steps"] if step["nodes"])
    return reasons, kernels


def child_main() -> None:
    """Runs in the new process: opens the session, prints who got which node as JSON, and runs it once."""
    onnxruntime = require_onnxruntime()

    from lowbit.errors import LowBitError
    from lowbit.proto.feeds import random_feeds
    from lowbit.proto.model_file import load_proto
    from lowbit.sessions.session import session

    path, device, shapes = sys.argv[1:4]
    sess_options = onnxruntime.SessionOptions()
    sess_options.add_session_config_entry(RECORD, "1")
    opened = session(path, device=device, sess_options=sess_options)
    regions, elsewhere = assignments(opened)
    print(json.dumps({"regions": regions, "elsewhere": elsewhere}))
    with contextlib.suppress(LowBitError):  # sizes that nobody gave: placed, but not planned
        opened.run(None, random_feeds(load_proto(path, external_data=False), shapes=json.loads(shapes)))
