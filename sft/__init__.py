"""Cold start: supervised fine-tuning on demonstrations, until reinforcement learning can take over."""
