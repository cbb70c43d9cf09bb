"""Small models for tests: a tiny-moe policy, and a Qwen3-type folder with a chat template, both with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from infra.compute.config import ModelConfig
from infra.compute.policy import LoadedPolicy, build_policy

TEXTS = ["Invoice on purchase order 1234: 3x45", "look up the purchase order", "calculator", '{"expression":"3*45"}']
CHAT_TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined and message.reasoning_content and loop.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endif %}{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tiny_policy(seed: int = 0, **overrides: Any) -> LoadedPolicy:
    """A tiny-moe policy whose sinks and weights are far enough from zero to matter."""
    policy = build_policy(ModelConfig(preset="tiny-moe", **overrides), TEXTS * 20, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * (1.0 if "sinks" in name else 0.05)
    return policy


def chat_model_folder(folder: Path) -> Path:
    """A random Qwen3-type model with a byte-level tokenizer and a Hermes-style template that drops old reasoning."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        eos_token_id=[fast.eos_token_id, fast.pad_token_id],
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
