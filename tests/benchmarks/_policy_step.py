"""The two sides of the policy-step benchmark: Senmon's trainer and TRL's, on one model and one workload."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data_contracts.records import Task
from domain_rewards.environments.base import ToolEnvironment, tool
from domain_rewards.episode import Episode
from domain_rewards.runtime import DomainRuntime
from domain_rewards.verifiers.base import verifier
from infra.compute.config import ModelConfig
from infra.compute.policy import LoadedPolicy, PolicyManifest, tiny_moe
from infra.inference.embedded.engine import EmbeddedEngine
from infra.inference.engine import StopReason, TokenEvent
from infra.inference.messages import Message, ToolCall
from infra.inference.renderers.base import ParsedTurn
from rl.config import ClipConfig, RLConfig
from rl.guards import GuardConfig
from rl.objectives.config import KLConfig
from rl.trainer import Trainer
from tests.memory import reset_peak, resident

VOCABULARY, PAD, END = 256, 0, 1
PROMPTS_PER_STEP, SAMPLED = 4, 64
TURNS, RESULT = 4, 32
LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 1e-4, 3e-2, 4e-2
MODEL = ModelConfig(
    preset="tiny-moe",
    hidden_size=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    expert_size=128,
    sliding_window=64,
    max_positions=4096,
)


@dataclass(frozen=True)
class Workload:
    """``prompt`` tokens, groups of ``group``; with ``tools`` 4 turns of 16 tokens with 3 results of 32 between them."""

    prompt: int
    group: int
    tools: bool = False

    @property
    def name(self) -> str:
        """``single/p64/g8`` or ``tools/p1024/g8``."""
        return f"{'tools' if self.tools else 'single'}/p{self.prompt}/g{self.group}"

    @property
    def turn(self) -> int:
        """Sampled tokens per turn."""
        return SAMPLED // TURNS if self.tools else SAMPLED

    def prompts(self) -> list[list[int]]:
        """64 random prompts, the same for both sides."""
        rng = random.Random(0)
        return [[rng.randrange(2, VOCABULARY) for _ in range(self.prompt)] for _ in range(64)]


def score(ids: Sequence[int]) -> float:
    """Share of odd tokens: a reward with variance in every group."""
    return sum(i % 2 for i in ids) / max(1, len(ids))


@dataclass
class Stopwatch:
    """Wall-clock seconds and peak resident memory above the start, per step."""

    seconds: list[float] = field(default_factory=list)
    peaks_mb: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    """Resident memory at the start of each step."""

    def time(self, work: Callable[[], Any]) -> None:
        """Run and record ``work``."""
        self.begin()
        work()
        self.end()

    def begin(self) -> None:
        """Start a step: the kernel's high-water mark is reset."""
        reset_peak()
        self.rss_mb.append(resident("VmRSS") / 2**20)
        self._start = time.perf_counter()

    def end(self) -> None:
        """End a step."""
        self.seconds.append(time.perf_counter() - self._start)
        self.peaks_mb.append(resident("VmHWM") / 2**20 - self.rss_mb[-1])


class _Tokens:
    """Stands in for a tokenizer: prompts are ids already."""

    pad_token_id = PAD


class _IdRenderer:
    """Messages are ids written as numbers; a turn of a tool workload calls the tool until the last one."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        return [int(word) for word in (messages[0].content or "").split()]

    def tool_results(self, results: Sequence[Message]) -> list[int]:
        return [int(word) for word in (results[0].content or "").strip('"').split()]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        calls = (ToolCall(name="reply", arguments="{}"),) if self.workload.tools else ()
        text = " ".join(map(str, ids))
        return ParsedTurn(Message(role="assistant", content=text, thinking=text, tool_calls=calls), 0, True)


class _FixedTurns(EmbeddedEngine):
    """Ends a turn after a fixed number of sampled tokens, as the fixed lengths of the comparison need."""

    turn = 0

    def step(self) -> list[TokenEvent]:
        events = super().step()
        self._count = getattr(self, "_count", 0) + bool(events)
        if not self.turn or not events or self._count % self.turn:
            return events
        return [TokenEvent(e.sequence, e.token, e.logprob, e.finished or StopReason.STOP) for e in events]


class _Replies(ToolEnvironment):
    @tool
    def reply(self) -> str:
        """32 random tokens."""
        rng = random.Random()
        return " ".join(str(rng.randrange(2, VOCABULARY)) for _ in range(RESULT))


@verifier("odd")
def _odd(episode: Episode) -> float:
    ids = [int(word) for m in episode.messages if m.role == "assistant" for word in (m.thinking or "").split()]
    return score(ids)


class Ours:
    """``rl.trainer.Trainer`` with one minibatch per rollout, as TRL's fair settings have it."""

    def __init__(self, workload: Workload) -> None:
        tasks = [
            Task(task_id=str(i), prompt=" ".join(map(str, ids)), reference={}, group_key=str(i))
            for i, ids in enumerate(workload.prompts())
        ]
        model = tiny_moe(MODEL, VOCABULARY, PAD, END, seed=0)
        renderer: Any = _IdRenderer(workload)
        tokenizer: Any = _Tokens()
        policy = LoadedPolicy(model, tokenizer, renderer, PolicyManifest(renderer="tiny"))
        config = RLConfig(
            steps=10_000,
            groups=PROMPTS_PER_STEP,
            group_size=workload.group,
            epochs=1,
            minibatch=PROMPTS_PER_STEP * workload.group,
            microbatch=PROMPTS_PER_STEP * workload.group,
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
            clip=ClipConfig(low=CLIP_LOW, high=CLIP_HIGH, modulation_high=0),
            aggregation="gspo",
            normalise_std=True,
            kl=KLConfig(measure=False),
            # Fixed lengths are all cut, and a random model learns nothing that would be healthy.
            guards=GuardConfig.model_validate(
                {"truncated": {"warn": None, "stop": None}, "repetition": {"warn": None, "stop": None}}
            ),
            max_tokens=SAMPLED,
            max_turns=TURNS,
        )
        self.trainer = Trainer(policy, config, tasks, DomainRuntime(_Replies, {}, (_odd,), None), 0)
        engine = _FixedTurns(model)
        engine.turn = workload.turn if workload.tools else 0
        self.trainer.learner.engine = engine
        self.watch = Stopwatch()
        self.drift = 0.0

    def step(self) -> None:
        """One timed training step."""
        figures: dict[str, float] = {}
        self.watch.time(lambda: figures.update(self.trainer.train_step()))
        self.drift = max(self.drift, figures["rl.logprob_drift"])
        assert figures["rl.tokens"] == SAMPLED, figures


class Theirs:
    """TRL's ``GRPOTrainer`` in the settings that make it the same GSPO step; others run in its step callback."""

    def __init__(self, workload: Workload, steps: int, after_step: Callable[[], None], folder: Path) -> None:
        os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        self.workload, self.watch = workload, Stopwatch()
        sequences = PROMPTS_PER_STEP * workload.group
        micro = min(sequences, 8 if workload.prompt >= 1024 else sequences)
        config = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            num_generations=workload.group,
            gradient_accumulation_steps=sequences // micro,
            steps_per_generation=sequences // micro,
            num_iterations=1,
            max_completion_length=SAMPLED + (TURNS - 1) * RESULT if workload.tools else SAMPLED,
            generation_kwargs={"min_new_tokens": SAMPLED},
            temperature=1.0,
            router_aux_loss_coef=0.0,
            beta=0.0,
            importance_sampling_level="sequence",
            loss_type="grpo",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            log_completions=False,
            dataloader_num_workers=0,
            max_grad_norm=1.0,
            seed=0,
        )
        tokenizer = _word_tokenizer()
        rows = {"prompt": [" ".join(f"t{i}" for i in ids) for ids in workload.prompts()]}
        self.trainer = GRPOTrainer(
            model=tiny_moe(MODEL, VOCABULARY, PAD, END, seed=0),
            reward_funcs=lambda completions, **_: [score(tokenizer(text).input_ids) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            rollout_func=self._episodes if workload.tools else None,
        )
        watch = self.watch

        class Interleave(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                watch.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                watch.end()
                after_step()

        self.trainer.add_callback(Interleave())

    def run(self) -> None:
        """All steps, each followed by ``after_step``."""
        self.trainer.train()

    def _episodes(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's tool loop with fixed lengths: every turn is generated from the whole token list again."""
        start = torch.tensor([trainer.processing_class(text).input_ids for text in prompts])
        ids, mask = start, []
        for turn in range(TURNS):
            with torch.no_grad():
                ids = trainer.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=self.workload.turn,
                    min_new_tokens=self.workload.turn,
                    pad_token_id=PAD,
                )
            mask += [1] * self.workload.turn
            if turn < TURNS - 1:
                ids = torch.cat([ids, torch.randint(2, VOCABULARY, (len(ids), RESULT))], 1)
                mask += [0] * RESULT
        completions = ids[:, start.shape[1] :].tolist()
        return {
            "prompt_ids": start.tolist(),
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": [mask] * len(prompts),
        }


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": END} | {f"t{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
    )
