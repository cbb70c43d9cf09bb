"""What the commands print: results on stdout (one JSON line with ``--json``), everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from infra.errors import EXIT_FAILED_CHECK, SenmonError
from infra.telemetry import logger
from pipelines.disk import disk_full

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130
PIPE_WIDTH = 10_000
LOGGERS = (logger.name, "serving")
"""What people shall see: the progress of a run, and what the gateway has to say."""


class _StderrHandler(logging.Handler):
    """Looks ``sys.stderr`` up for each line, so that lines and a progress bar (which replaces it) do not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def set_up_logging() -> None:
    """Senmon's own progress on stderr; other libraries only when something is wrong."""
    for name in LOGGERS:
        ours = logging.getLogger(name)
        if not any(isinstance(handler, _StderrHandler) for handler in ours.handlers):
            handler = _StderrHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
            ours.addHandler(handler)
        ours.setLevel(logging.INFO)
    logger.propagate = False
    # It prints the traceback of each database error that it raises as well; ours say it in words.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def command(as_json: bool) -> Iterator[None]:
    """Runs a command: expected failures become three lines and an exit code, with ``--json`` one more JSON line."""
    set_up_logging()
    try:
        yield
    except SenmonError as error:
        raise _told(error, as_json) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        if as_json:
            emit({"error": {"what": "interrupted", "where": "", "fix": ""}, "exit_code": EXIT_INTERRUPTED})
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(EXIT_FAILED_CHECK) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        full = disk_full(error, Path(os.environ.get("SENMON_HOME", ".senmon")).absolute(), "repeat the command")
        if full is not None:
            raise _told(full, as_json) from None
        traceback.print_exc()
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"error: unexpected: {what}", file=sys.stderr)
        if as_json:
            fix = "see the traceback on stderr; nothing that was finished is lost"
            emit({"error": {"what": what, "where": "unexpected error", "fix": fix}, "exit_code": EXIT_FAILED_CHECK})
        raise typer.Exit(EXIT_FAILED_CHECK) from None


def _told(error: SenmonError, as_json: bool) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    if as_json:
        emit({"error": {"what": error.what, "where": error.where, "fix": error.fix}, "exit_code": error.exit_code})
    return typer.Exit(error.exit_code)


def emit(value: Mapping[str, Any]) -> None:
    """One line of JSON on stdout; a NaN is a bug and raises ``ValueError``."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def result(as_json: bool, value: Mapping[str, Any], show: Callable[[Console], None]) -> None:
    """The command's result: ``value`` as JSON, or what ``show`` draws."""
    if as_json:
        emit(value)
        return
    show(console())


def console() -> Console:
    """A console on stdout; into a pipe or a file it breaks no line, for whoever reads it there has no width."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table; None is shown as a dash."""
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    drawn = Table(*(Column(name, overflow="fold", no_wrap=i == 0) for i, name in enumerate(columns)), box=box.SIMPLE)
    for row in rows:
        shown = ("–" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
        drawn.add_row(*map(Text, shown))  # as text: "[ray]" is no markup
    console.print(drawn)
