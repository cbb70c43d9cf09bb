"""Renderer of any Hugging Face model: its own chat template, ``<think>`` blocks and ``<tool_call>`` JSON.

Texts never pass through the template: it sees placeholders, and each text is encoded with control strings
disabled. A user who writes ``<|im_start|>`` therefore writes characters, not a control token. Where a template
ignores thinking, tools or tool calls, they are written into the content in the Hermes format
(github.com/NousResearch/Hermes-Function-Calling).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infra.errors import UsageError
from infra.inference.messages import Message, ToolCall, ToolSchema
from infra.inference.renderers.base import ParsedTurn, RenderedDemonstration
from infra.inference.renderers.chat_stream import ChatStreamParser

_SLOT = re.compile(r"zqslot(\d+)zq")
THINK, THINK_END = "<think>", "</think>"


class ChatRenderer:
    """Implements :class:`~infra.inference.renderers.base.Renderer` over ``tokenizer.apply_chat_template``.

    Args:
        tokenizer: with a chat template.
        stop_ids: end ids of the model's generation config; the tokenizer's end token is added.

    Raises:
        UsageError: the tokenizer has no chat template or no end token.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        if not tokenizer.chat_template or tokenizer.eos_token is None:
            raise UsageError(
                "the model's tokenizer has no chat template or no end token",
                where=str(tokenizer.name_or_path),
                fix="use an instruction-tuned model, or add chat_template.jinja and eos_token to its folder",
            )
        self.tokenizer = tokenizer
        self.stop_ids = frozenset({int(tokenizer.eos_token_id), *map(int, stop_ids)})
        probe = [
            Message(role="user", content="u"),
            Message(role="assistant", content="c", thinking="t", tool_calls=(ToolCall(name="n", arguments="{}"),)),
        ]
        slots = self._template(probe, (), False, native_thinking=True, native_calls=True)[1]
        self._native_thinking = "t" in slots
        self._native_calls = "n" in slots
        self._native_tools = "probe_tool" in self._raw([{"role": "user", "content": "u"}], [_schema(_PROBE)], True)
        start = self._template(probe[:1], (), True)[0]
        self._starts_in_reasoning = start.rstrip().endswith(THINK)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to the point where the assistant speaks."""
        return self._encode(*self._template(messages, tools, True))

    def tool_results(self, results: Sequence[Message]) -> list[int]:
        """What the template puts between an assistant's end token and its next turn."""
        asking = [Message(role="user", content="u"), Message(role="assistant", content="a")]
        before = self._template(asking, (), False)[0]
        text, slots = self._template([*asking, *results], (), True)
        end = before.rindex(self.tokenizer.eos_token) + len(self.tokenizer.eos_token)
        return self._encode(text[end:], slots)

    def demonstration(
        self, prompt: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> RenderedDemonstration:
        """Turn by turn, as the policy would have produced it: earlier turns are never rendered again."""
        ids: list[int] = []
        mask: list[int] = []
        position = 0
        while position < len(messages):
            if messages[position].role == "assistant":
                piece = self._turn(messages[position])
                mask += [1] * len(piece)
                position += 1
            else:
                stop = position
                while stop < len(messages) and messages[stop].role != "assistant":
                    stop += 1
                piece = self.tool_results(messages[position:stop])
                mask += [0] * len(piece)
                position = stop
            ids += piece
        return RenderedDemonstration(tuple(self.prompt(prompt, tools)), tuple(ids), tuple(mask))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Read one sampled turn; the same state machine as the stream's."""
        parser = self.stream_parser()
        deltas = [delta for token in ids for delta in parser.feed(token)] + parser.finish()
        reasoning = "".join(d.text for d in deltas if d.kind == "reasoning")
        content = "".join(d.text for d in deltas if d.kind == "content")
        names = [d.text for d in deltas if d.kind == "tool_name"]
        arguments = [
            "".join(d.text for d in deltas if d.kind == "tool_arguments" and d.index == i) for i in range(len(names))
        ]
        calls = tuple(ToolCall(name=n, arguments=a) for n, a in zip(names, arguments, strict=True))
        message = Message(
            role="assistant",
            content=content.strip() or None,
            thinking=reasoning.strip() if parser.thought else None,
            tool_calls=calls,
        )
        complete = bool(ids) and ids[-1] in self.stop_ids
        return ParsedTurn(message, parser.reasoning_tokens, complete, parser.malformed)

    def stream_parser(self) -> ChatStreamParser:
        """A parser for one streamed turn."""
        return ChatStreamParser(self.tokenizer, self.stop_ids, self._starts_in_reasoning)

    def forced_end_of_thinking(self) -> list[int]:
        """``</think>`` and the blank line that follows it in training data."""
        return list(self.tokenizer.encode(f"\n{THINK_END}\n\n", add_special_tokens=False))

    def _turn(self, message: Message) -> list[int]:
        """The ids of one assistant turn: what follows the generation prompt, up to and with the end token."""
        user = Message(role="user", content="u")
        start = self._template([user], (), True)[0]
        text, slots = self._template([user, message], (), False)
        if not text.startswith(start):
            start = self._template([user], (), False)[0]
            header = self._template([user], (), True)[0][len(start) :]
            if not text.startswith(start + header.removesuffix(f"{THINK}\n")):
                raise UsageError(
                    "the chat template does not append: an assistant turn is not a continuation of its prompt",
                    where=str(self.tokenizer.name_or_path),
                    fix="use a template whose rendering of a conversation starts with the rendering of its beginning",
                )
            start += header.removesuffix(f"{THINK}\n")
        end = text.rindex(self.tokenizer.eos_token) + len(self.tokenizer.eos_token)
        return self._encode(text[len(start) : end], slots)

    def _template(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        generate: bool,
        native_thinking: bool | None = None,
        native_calls: bool | None = None,
    ) -> tuple[str, list[str]]:
        """The rendered text with numbered slots in place of every message's texts, and the texts used."""
        thinking = self._native_thinking if native_thinking is None else native_thinking
        calls = self._native_calls if native_calls is None else native_calls
        slots: list[str] = []

        def slot(text: str | None) -> str:
            if not text:
                return ""
            slots.append(text)
            return f"zqslot{len(slots) - 1}zq"

        plain = [_plain(message, slot, thinking, calls) for message in messages]
        schemas = [_schema(tool) for tool in tools]
        if tools and not self._native_tools:
            text = "\n".join(json.dumps(schema) for schema in schemas)
            plain.insert(0, {"role": "system", "content": f"{_TOOL_PREAMBLE}\n<tools>\n{text}\n</tools>"})
            schemas = []
        rendered = self._raw(plain, schemas or None, generate)
        used = [slots[int(number)] for number in _SLOT.findall(rendered)]
        return rendered, slots if native_thinking is None else used

    def _raw(self, messages: list[dict[str, Any]], tools: Any, generate: bool) -> str:
        text = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
        return str(text)

    def _encode(self, text: str, slots: Sequence[str]) -> list[int]:
        """Template text with its control tokens, slot texts without."""
        ids: list[int] = []
        for position, part in enumerate(_SLOT.split(text)):
            if position % 2:
                ids += self.tokenizer.encode(slots[int(part)], add_special_tokens=False, split_special_tokens=True)
            elif part:
                ids += self.tokenizer.encode(part, add_special_tokens=False)
        return ids


_PROBE = ToolSchema(name="probe_tool", description="", parameters={"type": "object", "properties": {}})
_TOOL_PREAMBLE = (
    "You may call functions. For each call write a JSON object with name and arguments inside "
    '<tool_call></tool_call> tags: <tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>'
)


def _schema(tool: ToolSchema) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _plain(message: Message, slot: Any, native_thinking: bool, native_calls: bool) -> dict[str, Any]:
    """A message as the template's dictionary, every text a slot."""
    plain: dict[str, Any] = {"role": message.role, "content": slot(message.content)}
    if message.role == "tool":
        plain |= {"name": message.name or "", "tool_call_id": message.tool_call_id}
    if message.thinking is not None:
        if native_thinking:
            plain["reasoning_content"] = slot(message.thinking)
        else:
            plain["content"] = f"{THINK}\n{slot(message.thinking)}\n{THINK_END}\n\n{plain['content']}"
    if message.tool_calls and native_calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": slot(call.name), "arguments": _arguments(call, slot)}}
            for call in message.tool_calls
        ]
    elif message.tool_calls:
        blocks = [
            f'<tool_call>\n{{"name": "{slot(call.name)}", "arguments": {slot(call.arguments)}}}\n</tool_call>'
            for call in message.tool_calls
        ]
        plain["content"] = "\n".join([plain["content"], *blocks] if plain["content"] else blocks)
    return plain


def _arguments(call: ToolCall, slot: Any) -> Any:
    """Arguments as an object (templates dump it themselves; a string would be escaped twice), values as slots."""
    try:
        values = json.loads(call.arguments or "{}")
    except ValueError:
        return slot(call.arguments)
    if not isinstance(values, dict):
        return slot(call.arguments)
    return {key: slot(value) if isinstance(value, str) and value else value for key, value in values.items()}
