"""Objectives as pure functions of tensors: dataclass in, dataclass out, no state."""
