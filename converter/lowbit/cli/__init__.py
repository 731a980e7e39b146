"""The command ``lowbit``: one subcommand per file, a thin face of the Python function of the same name."""

from __future__ import annotations

import importlib

import click

from lowbit import __version__
from lowbit.cli.interrupt import prompt_interrupts

COMMANDS = (
    "sys",
    "inspect",
    "convert",
    "quantize",
    "finetune",
    "search",
    "export",
    "tune",
    "compile",
    "run",
    "eval",
    "verify",
    "bench",
)


class _Commands(click.Group):
    """Imports a subcommand when it is asked for, so that ``lowbit --help`` does not load ONNX Runtime."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"lowbit.cli.{cmd_name}").command
        return command


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage or unusable input, 3 cannot be said exactly (convert "
    "--strict, export), 130 interrupted.",
)
@click.version_option(__version__, prog_name="lowbit")
@click.option("-v", "--verbose", is_flag=True, help="As after the subcommand.")
@click.option("-q", "--quiet", is_flag=True, help="As after the subcommand.")
@click.option("--format", type=click.Choice(["table", "json"]), help="As after the subcommand, which wins.")
def cli(verbose: bool, quiet: bool, format: str | None) -> None:
    """Run quantized ONNX models at 1 to 8 bits inside ONNX Runtime."""


def main() -> None:
    """Entry point of the installed command."""
    with prompt_interrupts():
        cli(prog_name="lowbit")
