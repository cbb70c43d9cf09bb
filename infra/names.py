"""The one rule for domain names: they become model names, file names and experiment names."""

from __future__ import annotations

import re

from infra.errors import UsageError

DOMAIN_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")


def check_domain(name: str) -> str:
    """``name`` itself if it is a valid domain name.

    Raises:
        UsageError: anything but a lower-case letter followed by up to 62 of ``a-z 0-9 _ -``.
    """
    if DOMAIN_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} is not a valid domain name",
            where="domain name",
            fix="use lower-case letters, digits, '_' and '-', starting with a letter, at most 63 characters",
        )
    return name
