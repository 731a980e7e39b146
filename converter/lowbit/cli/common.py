"""What all subcommands share: options, exit codes, tables, progress, and one line for every error."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from lowbit.errors import LowBitError, UnsupportedError, is_out_of_memory
from lowbit.text import printable

if TYPE_CHECKING:
    from lowbit.proto.report import ReasonGroup

CHECK_FAILED = 1
UNUSABLE = 2
UNSUPPORTED = 3

COLUMN_GAP = 3
CELL_WIDTH = 56
"""Longest name that a table shows in full; --format json always does."""

PIPE_WIDTH = 1000
"""Columns of a table that goes to a file or a pipe, where nothing tells a width."""


@dataclass
class Out:
    """Where a command prints: results to stdout, everything else to stderr."""

    format: str
    verbosity: int  # -1 quiet, 0, 1 verbose

    def __post_init__(self) -> None:
        """Consoles that follow the terminal, or a fixed width where there is none."""
        self.stdout = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self.stderr = Console(stderr=True, highlight=False, emoji=False)

    @property
    def as_json(self) -> bool:
        """Whether stdout must hold one JSON document and nothing else."""
        return self.format == "json"

    def json(self, value: Any) -> None:
        """Prints the one JSON document of a command."""
        click.echo(json.dumps(value, indent=2))

    def print(self, text: str = "") -> None:
        """Prints a line of the result, with rich markup."""
        self.stdout.print(printable(text, keep="\n"), soft_wrap=True)

    def note(self, text: str) -> None:
        """Prints a remark to stderr unless -q is given."""
        if self.verbosity >= 0:
            self.stderr.print(printable(text, keep="\n"), soft_wrap=True, markup=False)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        title: str | None = None,
        optional: Sequence[str] = (),
    ) -> None:
        """Prints a table.

        Args:
            columns: the names; one that ends in ``>`` aligns its column to the right.
            rows: the cells; a column without any is left out.
            title: printed above the table.
            optional: columns that a narrow terminal does without, the first of them first.
        """
        cells = [[_cell(value) for value in row] for row in rows]
        shown = [i for i in range(len(columns)) if any(row[i] for row in cells)]
        widths = [max(len(text) for text in (columns[i].rstrip(">"), *(row[i] for row in cells)))
                  for i in range(len(columns))]  # fmt: skip
        for name in optional:
            if sum(widths[i] + COLUMN_GAP for i in shown) > self.stdout.width:
                shown = [i for i in shown if columns[i] != name]
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, title=title and _plain(title), title_justify="left",
            title_style="bold",
        )  # fmt: skip
        for i in shown:
            justify: Literal["left", "right"] = "right" if columns[i].endswith(">") else "left"
            table.add_column(_plain(columns[i].rstrip(">")), justify=justify, overflow="fold")
        for row in cells:
            table.add_row(*(escape(row[i]) for i in shown))
        self.stdout.print(table)

    def facts(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Prints aligned ``name  value`` lines; values of None are left out."""
        given = [(name, value) for name, value in rows if value is not None]
        width = max((len(name) for name, _ in given), default=0)
        for name, value in given:
            self.print(f"[bold]{_plain(f'{name:<{width}}')}[/bold]  {_plain(str(value))}")

    def status(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Shows a spinner on stderr while the body runs, if stderr is a terminal."""
        silent = not self.stderr.is_terminal or self.verbosity < 0
        return contextlib.nullcontext() if silent else self.stderr.status(_plain(what))

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Shows a bar on stderr while the body runs, if stderr is a terminal; call it with (done, total)."""
        silent = not self.stderr.is_terminal or self.verbosity < 0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self.stderr, transient=True, disable=silent) as progress:
            task = progress.add_task(_plain(what), total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextlib.contextmanager
    def steps(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        """The same, called with words besides, which -v prints."""
        with self.progress(what) as show:

            def tell(done: int, total: int, text: str) -> None:
                show(done, total)
                if self.verbosity > 0:
                    self.note(f"{done}/{total} {text}")

            yield tell


def _plain(text: str) -> str:
    """Text for rich that shows as it is: neither markup nor control characters."""
    return escape(printable(text))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value))
    # Some exporters join the names of everything a node was fused from; its two ends tell it apart.
    return (
        text
        if len(text) <= CELL_WIDTH or " " in text
        else f"{text[: CELL_WIDTH // 2]}..{text[-CELL_WIDTH // 2 :]}"
    )


class Command(click.Command):
    """A subcommand whose every failure is one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command with ``out`` made from -q, -v and --format, given to it or in front of it."""
        before = ctx.parent.params if ctx.parent is not None else {}
        verbose, quiet = (ctx.params.pop(name) or before.get(name) for name in ("verbose", "quiet"))
        form = ctx.params.pop("format")
        if ctx.get_parameter_source("format") == ParameterSource.DEFAULT:
            form = before.get("format") or form
        out = Out(form, 1 if verbose else -1 if quiet else 0)
        ctx.params["out"] = out
        try:
            with _warnings_as_remarks(out):
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit):
            raise
        except BrokenPipeError:  # the reader of our stdout, such as `head`, has seen enough
            sys.stderr.close()
            sys.exit(0)
        except LowBitError as error:
            _fail(out, str(error), UNSUPPORTED if isinstance(error, UnsupportedError) else UNUSABLE)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if is_out_of_memory(error):
                _fail(out, f"out of memory ({what}); free some, or use a machine with more", UNUSABLE)
            _fail(out, f"{what}; this is a defect of lowbit, -v shows where", UNUSABLE)


@contextlib.contextmanager
def _warnings_as_remarks(out: Out) -> Iterator[None]:
    """Shows what Python programs get as a RuntimeWarning in one line, without the code that it came from.

    What other packages log (onnx_ir: names of a broken model) becomes a remark as well.
    """
    last_resort, logging.lastResort = logging.lastResort, _Remarks(out)
    with warnings.catch_warnings():
        show = warnings.showwarning

        def remark(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category is RuntimeWarning:
                out.note(f"warning: {message}")
            else:
                show(message, category, *where, **more)

        warnings.showwarning = remark
        try:
            yield
        finally:
            logging.lastResort = last_resort


class _Remarks(logging.StreamHandler):  # type: ignore[type-arg]  # generic to the checker alone
    """The handler of records that no handler was set up for."""

    def __init__(self, out: Out) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        self.out.note(f"warning: {record.getMessage()}")


def _fail(out: Out, message: str, code: int) -> None:
    if out.verbosity > 0:
        click.echo(printable(traceback.format_exc(), keep="\n"), err=True, nl=False)
    click.echo(f"lowbit: {printable(' '.join(message.split()))}", err=True)
    sys.exit(code)


def subcommand(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function a subcommand: adds -q, -v and --format, and passes ``out``."""

    def decorate(function: Callable[..., None]) -> click.Command:
        for option in (
            click.option("-v", "--verbose", is_flag=True, help="More detail; a traceback after errors."),
            click.option("-q", "--quiet", is_flag=True, help="No progress and no remarks."),
            click.option("--format", type=click.Choice(["table", "json"]), default="table", show_default=True,
                         help="How to print the result."),
        ):  # fmt: skip
            function = option(function)
        return click.command(name, cls=Command)(function)

    return decorate


# ---- options and arguments with one spelling everywhere

MODEL = click.Path(path_type=Path, dir_okay=False)

model_argument = click.argument("model", type=MODEL)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), default=None, help="Intra-op threads of the sessions."
)
seed_option = click.option("--seed", type=int, default=0, show_default=True, help="Seed of random inputs.")
shape_option = click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=D0,D1,..",
    help="Size of an input with symbolic dims; may be repeated.",
)
input_quant_option = click.option(
    "--input-quant",
    multiple=True,
    metavar="[NAME:]scale=1/255,bits=8,unsigned",
    help="Round a float input to codes, so that the first layer has some; may be repeated.",
)
preprocess_option = click.option(
    "--preprocess",
    metavar="SPEC",
    help="How an image becomes an input: raw, imagenet, KEY=VALUE,.. or module:function.",
)
report_option = click.option(
    "--report", "report_file", type=MODEL, help="Also write the report to FILE.html or FILE.json."
)


plots_option = click.option(
    "--plots",
    "plots_folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write the report's charts as PNG files.",
)

batch_option = click.option(
    "--batch", default="", metavar="N,..", help="Batch sizes to measure for, such as 1,16, on a GPU."
)
provider_option = click.option(
    "--option",
    "provider_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the execution provider, such as float_regions=1; may be repeated.",
)


def device_option(default: str | None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``--device``, with a default or, where it is None, without any."""
    return click.option(
        "--device",
        default=default,
        show_default=default is not None,
        metavar="DEVICE",
        help="cpu; cpu-ep or cpu-ops (whole regions, or custom ops); cuda or cuda:N (an NVIDIA GPU).",
    )


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """What `--option` was given. Raises click.UsageError for text that is no KEY=VALUE."""
    pairs = [text.partition("=") for text in texts]
    for text, (key, equals, _) in zip(texts, pairs, strict=True):
        if not (key and equals):
            raise click.UsageError(f"--option expects KEY=VALUE such as float_regions=1, got '{text}'")
    return {key: value for key, _, value in pairs}


def parse_batches(text: str) -> list[int]:
    """``"1,16"`` as numbers. Raises click.UsageError for anything else."""
    try:
        batches = [int(word) for word in text.split(",") if word]
    except ValueError:
        batches = [0]
    if any(batch < 1 for batch in batches):
        raise click.UsageError(f"--batch expects positive numbers such as 1,16, got '{text}'")
    return batches


def written_model(model: Path, output: Path, report: Any) -> dict[str, Any]:
    """What a command that wrote a model says of it in JSON."""
    from lowbit.proto.model_file import stored_bytes

    return {
        "model": str(model),
        "output": str(output),
        "bytes_before": stored_bytes(model),
        "bytes_after": stored_bytes(output),
        "report": report.to_dict(),
    }


def write_report(path: Path, document: Any, page: Callable[[], str], *, overwrite: bool) -> None:
    """Writes a report as JSON or, under any other suffix, as an HTML page; whole or not at all."""
    from lowbit.proto.atomic import write_atomically

    text = json.dumps(document, indent=2) if path.suffix == ".json" else page()

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write, overwrite=overwrite)


STAY = "why they stay with ONNX Runtime"


def print_reasons(out: Out, groups: Sequence[ReasonGroup], why: str = STAY) -> None:
    """Prints a row for each reason, with how many nodes it holds for; ``why`` is what they are reasons of."""
    rows = [(len(group.nodes), group.counted, group.reason, group.nodes[0]) for group in groups]
    columns = ["nodes>", "ops", why, "such as"]
    out.table(columns, rows, optional=("such as",))


def megabytes(size: int) -> str:
    """A file size as people read it, in units of 1000."""
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
