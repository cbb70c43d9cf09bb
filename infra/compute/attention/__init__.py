"""Exact attention with learnable sinks, in memory linear in the context."""
