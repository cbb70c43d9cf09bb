"""Conversations, their rendering to token ids, and engines that generate."""
