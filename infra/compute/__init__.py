"""Training substrate: models, tokenizers, policies on disk, log-probs, checkpoints."""
