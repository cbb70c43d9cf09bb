"""Errors that say what went wrong, where, and how to fix it."""

from __future__ import annotations

EXIT_FAILED_CHECK = 1
EXIT_USAGE = 2


class SenmonError(Exception):
    """An expected failure: shown to the user as three short lines, never as a traceback.

    Args:
        what: what went wrong, one sentence.
        where: file and line, record, stage, or URL in which it happened.
        fix: what the user can do about it.
    """

    exit_code = EXIT_FAILED_CHECK

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class UsageError(SenmonError):
    """Bad input: unknown domain, broken YAML, missing file, port in use (exit code 2)."""

    exit_code = EXIT_USAGE


class CheckFailed(SenmonError):
    """A contract, gate or guard said no (exit code 1)."""
