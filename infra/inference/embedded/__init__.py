"""The embedded engine: continuous batching on the trainer's own weights, in process."""
