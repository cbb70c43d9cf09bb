"""Reinforcement learning on verified rewards: objectives, rollout, trainer, evaluation."""
