"""Renderers: one per model family."""
