"""Fixtures of the whole loop."""

from tests.integration.loop import loop, prefect_url

__all__ = ["loop", "prefect_url"]
