"""``lowbit sys``: what this machine and this installation can do."""

from __future__ import annotations

from collections import Counter

from lowbit.cli.common import Out, subcommand


@subcommand("sys")
def command(out: Out) -> None:
    """Show versions, the library, devices, instruction sets and kernels."""
    from lowbit.inspection.sysinfo import sysinfo

    info = sysinfo()
    if out.as_json:
        out.json(info)
        return
    library, isa, machine = info["library"], info["isa"], info["machine"]
    api = library["api"] and f"requires {library['api']['required']}, offered {library['api']['offered']}"
    out.facts([(name, version or "not installed") for name, version in info["versions"].items()])
    out.print()
    out.facts(
        [
            ("machine", f"{machine['system']}, {machine['cpu']}, {machine['cores']} cores"),
            ("gpu", ", ".join(machine["gpu"]) or "none"),
            ("library", library["path"] or library.get("error")),
            ("onnxruntime API", api),
            ("instruction sets", ", ".join(isa["machine"]) or "unknown"),
            ("used", isa["used"] and isa["used"] + (" (capped by LOWBIT_ISA)" if isa["cap"] else "")),
        ]
    )
    out.table(
        ["device", "", "why it cannot be used"],
        [(each["name"], each["description"], each["reason"]) for each in info["devices"]],
    )
    counts = Counter((kernel["op"], kernel["algorithm"], kernel["isa"]) for kernel in info["kernels"])
    if out.verbosity > 0:
        columns = ["kernel", "op", "instruction set", "x bits", "w bits", "good at"]
        out.table(
            columns,
            [
                (k["name"], k["op"], k["isa"], f"1..{k['x_bits_max']}", f"1..{k['w_bits_max']}", k["note"])
                for k in info["kernels"]
            ],
        )
    elif counts:
        out.table(["kernels of", "algorithm", "instruction set", "number>"],
                  [(*key, count) for key, count in sorted(counts.items())])  # fmt: skip
