"""The embedded engine: rows join and leave at every step, and keep their cache across tool calls."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from infra.inference.embedded.decoder import ChunkDecoder, Decoder
from infra.inference.embedded.generic import TransformersDecoder
from infra.inference.embedded.gptoss import GptOssDecoder
from infra.inference.embedded.sampling import sample
from infra.inference.engine import SamplingParams, StopReason, TokenEvent

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CHUNK = 16
"""Pending tokens from which on a row is fed by itself instead of one token a step."""


@dataclass
class _Sequence:
    """A sequence that has a row. ``pending`` are tokens to feed; it samples when they have all been fed."""

    handle: int
    params: SamplingParams
    random: random.Random
    pending: deque[int] = field(default_factory=deque)
    length: int = 0
    """Tokens of the sequence so far: prompt, sampled and appended ones."""
    sampled: int = 0
    running: bool = True


_Ready = tuple[list[_Sequence], torch.Tensor]
"""Sequences that sample now and their logits ``[sequences, vocabulary]``."""


class EmbeddedEngine:
    """Implements :class:`~infra.inference.engine.Engine` on a model in this process.

    Sequences submitted together on one prompt share its prefill. A sequence that stopped keeps its cache
    until it is released.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._chunked: ChunkDecoder | None = None
        self._decoder: Decoder
        if model.config.model_type == "gpt_oss":
            self._decoder = self._chunked = GptOssDecoder(model)
        else:
            self._decoder = TransformersDecoder(model)
        self._context = int(model.config.max_position_embeddings)
        self._rows: list[_Sequence] = []
        self._waiting: list[tuple[list[int], list[_Sequence]]] = []
        self._next_handle = 0
        self._weight_version = 0
        self._asleep = False

    @property
    def weight_version(self) -> int:
        """Counts calls of :meth:`sync` and :meth:`wake`."""
        return self._weight_version

    @property
    def context(self) -> int:
        """Most tokens a sequence may have, prompt included."""
        return self._context

    @property
    def running(self) -> int:
        """Sequences that will sample at the next step."""
        return sum(row.running for row in self._rows) + sum(len(group) for _, group in self._waiting)

    def sync(self) -> None:
        """Take over weights changed in place.

        Raises:
            RuntimeError: sequences are still open (their cache belongs to the old weights), or the engine sleeps.
        """
        self._awake()
        self._without_sequences("weights changed")
        self._decoder.sync()
        self._weight_version += 1

    def checksum(self) -> int:
        """CRC-32 of the weights taken over at the last :meth:`sync` or :meth:`wake`.

        Updates of the model leave it alone until a sync brings them; then it equals that of a new engine on the
        model. Equal values before and after a sync that follows an update mean that nothing arrived.

        Raises:
            RuntimeError: the engine sleeps.
        """
        self._awake()
        return self._decoder.checksum()

    def sleep(self) -> None:
        """Free the engine's copies of the weights and its caches; until :meth:`wake` it refuses to generate.

        Raises:
            RuntimeError: sequences are still open, or the engine sleeps already.
        """
        self._awake()
        self._without_sequences("the engine cannot sleep")
        self._decoder.sleep()
        self._asleep = True

    def wake(self) -> None:
        """Generate again, with the weights the model has now.

        Raises:
            RuntimeError: the engine does not sleep.
        """
        if not self._asleep:
            raise RuntimeError("the engine is awake: call sync() to take over weights")
        self._decoder.sync()
        self._weight_version += 1
        self._asleep = False

    def submit(self, prompt: Sequence[int], sampling: Sequence[SamplingParams]) -> list[int]:
        """Open one sequence per element of ``sampling``; the prompt is computed at the next step.

        Raises:
            ValueError: the prompt is empty, or leaves no room for an answer.
            RuntimeError: the engine sleeps.
        """
        self._awake()
        if not prompt:
            raise ValueError("an empty prompt has no next token: render at least one token")
        if len(prompt) >= self._context:
            raise ValueError(f"the prompt has {len(prompt)} tokens, the model's context is {self._context}")
        group = []
        for params in sampling:
            group.append(_Sequence(self._next_handle, params, random.Random(params.seed), length=len(prompt)))
            self._next_handle += 1
        self._waiting.append((list(prompt), group))
        return [sequence.handle for sequence in group]

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append given tokens after what the sequence has sampled so far, and let it go on.

        Raises:
            KeyError: no such sequence, or it has not taken its first step yet.
            ValueError: no tokens, or the context is full.
            RuntimeError: the engine sleeps.
        """
        self._awake()
        row = self._find(sequence)
        if not tokens:
            raise ValueError("nothing to append")
        if row.length + len(tokens) >= self._context:
            raise ValueError(f"{len(tokens)} more tokens do not fit into the model's context of {self._context}")
        row.length += len(tokens)
        row.pending.extend(tokens)
        row.running = True

    def step(self) -> list[TokenEvent]:
        """Advance every running sequence by one token, sampled or given.

        Raises:
            CheckFailed: logits are not finite.
            RuntimeError: the engine sleeps.
        """
        self._awake()
        single = [row.running and not (self._chunked and len(row.pending) >= CHUNK) for row in self._rows]
        parts = [*self._feed_chunks(), *self._feed(single), *self._admit()]
        if not parts:
            return []
        ready = [row for rows, _ in parts for row in rows]
        return self._sample(ready, torch.cat([logits for _, logits in parts]))

    def release(self, sequence: int) -> None:
        """Forget a sequence; unknown handles are ignored."""
        for index, row in enumerate(self._rows):
            if row.handle == sequence:
                self._decoder.remove(index)
                last = self._rows.pop()
                if index < len(self._rows):
                    self._rows[index] = last
                return
        for _, group in self._waiting:
            group[:] = [waiting for waiting in group if waiting.handle != sequence]
        self._waiting = [entry for entry in self._waiting if entry[1]]

    def _feed(self, fed: list[bool]) -> list[_Ready]:
        """One token to every row with ``fed``."""
        if not any(fed):
            return []
        tokens = [row.pending.popleft() if now else 0 for row, now in zip(self._rows, fed, strict=True)]
        logits = self._decoder.feed(torch.tensor(tokens), torch.tensor(fed))
        at = [i for i, row in enumerate(self._rows) if fed[i] and not row.pending]
        return [([self._rows[i] for i in at], logits if len(at) == len(fed) else logits[at])]

    def _feed_chunks(self) -> list[_Ready]:
        """Feed long tool results whole; short ones ride along with the other rows' steps, token by token."""
        if self._chunked is None:
            return []
        long = [i for i, row in enumerate(self._rows) if row.running and len(row.pending) >= CHUNK]
        if not long:
            return []
        logits = self._chunked.feed_chunk(long, [list(self._rows[i].pending) for i in long])
        for i in long:
            self._rows[i].pending.clear()
        return [([self._rows[i] for i in long], logits)]

    def _admit(self) -> list[_Ready]:
        if not self._waiting:
            return []
        logits = self._decoder.add([prompt for prompt, _ in self._waiting], [len(group) for _, group in self._waiting])
        admitted = [sequence for _, group in self._waiting for sequence in group]
        self._waiting = []
        self._rows += admitted
        return [(admitted, logits)]

    def _sample(self, ready: list[_Sequence], logits: torch.Tensor) -> list[TokenEvent]:
        params = [row.params for row in ready]
        tokens, logprobs = sample(logits, params, [row.random.random() for row in ready])
        events = []
        for row, token, logprob in zip(ready, tokens.tolist(), logprobs.tolist(), strict=True):
            row.sampled += 1
            row.length += 1
            row.pending.append(token)
            reason = None
            if token in row.params.stop_ids:
                reason = StopReason.STOP
            elif row.sampled >= row.params.max_tokens or row.length >= self._context:
                reason = StopReason.LENGTH
            row.running = reason is None
            events.append(TokenEvent(row.handle, token, logprob, reason))
        return events

    def _awake(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake() it first, so that it takes over the present weights")

    def _without_sequences(self, what: str) -> None:
        if self._rows or self._waiting:
            raise RuntimeError(f"{what} while sequences are open: release them first")

    def _find(self, handle: int) -> _Sequence:
        for row in self._rows:
            if row.handle == handle:
                return row
        raise KeyError(f"no open sequence {handle}")
