"""How much memory a training step or a rollout needs on each GPU, before any of them is rented."""
