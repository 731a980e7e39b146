"""Which nodes of a model the execution provider takes, and why it leaves the others.

ONNX Runtime tells a session's owner who got which node; why not is in the log alone. Logs go to the standard
error of the process, so the session is opened in a process of its own, whose output nobody else writes to.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowbit.errors import ModelError

_LEFT = re.compile(r"lowbit: node '(?P<name>.*?)' \((?P<op>[^()]*)\) stays with ONNX Runtime: (?P<why>.*)")
_RECORD = "session.record_ep_graph_assignment_info"
_INFO = 1


@dataclass
class Placement:
    """Where the nodes of a model run.

    Attributes:
        regions: the names of the nodes in each region that the execution provider took.
        reasons: of the nodes that it left, by name.
        elsewhere: names of the nodes of the other providers, ONNX Runtime's own additions (copies) included.
    """

    regions: list[list[str]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def taken(self) -> set[str]:
        """The names of all nodes in regions."""
        return {name for region in self.regions for name in region}


def place(path: str, device: str, provider_options: Mapping[str, str] | None = None) -> Placement:
    """Opens a converted model on a device, in a new process, and tells where its nodes went.

    Raises:
        ModelError: if it does not open there.
    """
    command = [sys.executable, "-c", "from lowbit.placement import child_main; child_main()"]
    arguments = [path, device, json.dumps(dict(provider_options or {}))]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"{path}: does not open on device '{device}': {reason.partition(': ')[2] or reason}")
    found = Placement(**json.loads(done.stdout))
    found.reasons = reasons_in(done.stderr)
    return found


def reasons_in(log: str) -> dict[str, str]:
    """Node name -> why it was left, from what the execution provider logs at level INFO."""
    return {found["name"]: found["why"].strip() for found in _LEFT.finditer(log)}


def child_main() -> None:
    """Runs in the new process: opens the session and prints who got which node, as JSON."""
    import onnxruntime

    from lowbit.devices import get_ep_name
    from lowbit.session import session

    path, device, options = sys.argv[1:4]
    sess_options = onnxruntime.SessionOptions()
    sess_options.log_severity_level = _INFO
    sess_options.add_session_config_entry(_RECORD, "1")
    opened = session(path, device=device, sess_options=sess_options, provider_options=json.loads(options))
    placement = Placement()
    for subgraph in opened.get_provider_graph_assignment_info():
        names = [str(node.name) for node in subgraph.get_nodes()]
        if subgraph.ep_name == get_ep_name():
            placement.regions.append(names)
        else:
            placement.elsewhere += names
    print(json.dumps({"regions": placement.regions, "elsewhere": placement.elsewhere}))
