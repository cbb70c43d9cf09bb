"""The preset's tokenizer: byte-level BPE learnt from a domain's own text, plus control tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, SYSTEM, USER, END = "<|pad|>", "<|system|>", "<|user|>", "<|end|>"
THINK, THINK_END, ANSWER = "<|think|>", "<|/think|>", "<|answer|>"
TOOL, ARGS, CALL = "<|tool|>", "<|args|>", "<|call|>"
RESULT, RESULT_END = "<|result|>", "<|/result|>"
CONTROL_TOKENS = (PAD, SYSTEM, USER, END, THINK, THINK_END, ANSWER, TOOL, ARGS, CALL, RESULT, RESULT_END)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn merges from ``texts``; the same texts give the same tokenizer.

    Every byte is in the alphabet, so any text can be encoded. Digits never merge: numbers are read digit by
    digit. Text is not split at spaces, so a phrase that recurs in a domain becomes one token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=8,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of plain text; control strings inside it stay text and never become control tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    """The bytes of every text token, by id; control tokens are left out.

    Byte-level BPE (the GPT-2 alphabet) writes a byte as itself where that prints, else as the character 256 + n.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return {
        number: bytes(alphabet[character] for character in token)
        for token, number in tokenizer.get_vocab().items()
        if token not in CONTROL_TOKENS
    }
