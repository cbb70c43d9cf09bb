"""A decoder for any transformers causal language model: left-padded rows over its own key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infra.inference.embedded.decoder import crc


class TransformersDecoder:
    """Implements :class:`~infra.inference.embedded.decoder.Decoder` with ``past_key_values``.

    All layers keep their full past (a sliding window is applied by the model's own mask), so rows that joined
    at different times can share one batch.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.size = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self.sync()

    def sync(self) -> None:
        """Nothing is copied from the model; only the checksum is taken again."""
        self._without_rows()
        self._checksum = crc(self.model.parameters())

    def sleep(self) -> None:
        """Free the caches."""
        self._without_rows()
        self._keys, self._values, self._mask = [], [], torch.zeros(0, 0, dtype=torch.long)

    def checksum(self) -> int:
        """CRC-32 of the model's parameters as they were at the last sync."""
        return self._checksum

    @torch.no_grad()
    def add(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Prefill each prompt once (left-padded to the longest) and copy its cache to its rows."""
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        logits, keys, values = self._run(tokens, mask, [], [])
        times = torch.tensor(copies)
        self._join(
            [k.repeat_interleave(times, 0) for k in keys],
            [v.repeat_interleave(times, 0) for v in values],
            mask.repeat_interleave(times, 0),
        )
        return logits.repeat_interleave(times, 0)

    @torch.no_grad()
    def feed(self, tokens: Tensor, active: Tensor) -> Tensor:
        """One token per active row; an idle row's past moves right, so that no hole widens a sliding window."""
        old_keys, old_values, idle = self._keys, self._values, ~active
        mask = torch.cat([self._mask, active.long()[:, None]], 1)
        logits, self._keys, self._values = self._run(tokens[:, None], mask, old_keys, old_values)
        if bool(idle.any()):
            mask[idle, 1:] = self._mask[idle]
            mask[idle, 0] = 0
            for new, old in zip(self._keys + self._values, old_keys + old_values, strict=True):
                new[idle, :, 1:] = old[idle]
        self._mask = mask
        return logits

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number. Columns that nobody uses any more are dropped too."""
        keep = torch.arange(self.size)
        keep[row] = self.size - 1
        keep = keep[: self.size - 1]
        self.size -= 1
        self._mask = self._mask[keep]
        first = int(self._mask.any(0).long().argmax()) if self.size else self._mask.shape[1]
        self._mask = self._mask[:, first:]
        self._keys = [k[keep, :, first:] for k in self._keys]
        self._values = [v[keep, :, first:] for v in self._values]

    def _without_rows(self) -> None:
        if self.size:
            raise RuntimeError("weights changed while sequences are open: release them first")

    def _run(
        self, tokens: Tensor, mask: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            cache.update(k, v, layer)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]

    def _join(self, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> None:
        if self.size:
            width = max(self._mask.shape[1], mask.shape[1])
            self._mask = torch.cat([_left_pad(self._mask, width, 1), _left_pad(mask, width, 1)])
            self._keys = [
                torch.cat([_left_pad(old, width, 2), _left_pad(new, width, 2)])
                for old, new in zip(self._keys, keys, strict=True)
            ]
            self._values = [
                torch.cat([_left_pad(old, width, 2), _left_pad(new, width, 2)])
                for old, new in zip(self._values, values, strict=True)
            ]
        else:
            self._mask, self._keys, self._values = mask, keys, values
        self.size = self._mask.shape[0]


def _left_pad(tensor: Tensor, width: int, dim: int) -> Tensor:
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim)
