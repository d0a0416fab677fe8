"""What a worker is told when it connects: the settings of the run's rollouts, its model, and the engine's limits."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.config.base import FrozenModel
from trainer.engine.base import Capabilities, Engine
from trainer.rollout.settings import BaseRolloutSettings

if TYPE_CHECKING:
    from trainer.template import Template

PROBE = ({"role": "user", "content": 'Where are the 3 naïve cats\' 1,024 files?\n\t{"a": [1.5e-3]} <b>猫 🐈</b>'},)
"""A chat that other tokenizers and chat templates encode otherwise."""


class PlayedSettings(BaseRolloutSettings):
    """The settings of rollouts, as workers read them; rows come with each rollout."""

    data: str = ""


class TokenizerPrint(FrozenModel):
    """What tells a tokenizer and its chat template from others."""

    tokens: int
    vocabulary: str
    """A digest of all tokens with their ids."""
    chat: str
    """A digest of the ids of a chat."""

    @classmethod
    def take(cls, template: Template) -> TokenizerPrint:
        """The fingerprint of a template's tokenizer, and of the template."""
        vocabulary = sorted(template.tokenizer.vocabulary.items())
        digests = (_digest(values) for values in (vocabulary, template.encode_prompt(PROBE, ())))
        return cls(tokens=len(vocabulary), vocabulary=next(digests), chat=next(digests))

    def find_difference(self, other: TokenizerPrint) -> str:
        """How another one differs, in words; empty if it does not."""
        if other.tokens != self.tokens:
            return f"its tokenizer has {other.tokens} tokens, not {self.tokens}"
        if other.vocabulary != self.vocabulary:
            return "its tokenizer gives tokens other ids"
        return "its tokenizer or chat template encodes a chat otherwise" if other.chat != self.chat else ""


class WorkerJob(FrozenModel):
    """All that a worker needs to open its gateway, template and stepper."""

    settings: PlayedSettings
    model: Path
    engine: Capabilities
    tokenizer: TokenizerPrint
    """That of the training process: ids of another one would mean other text."""
    vocabulary: int
    """Ids of the model are below this."""
    silent_s: float
    """How long either side may be silent."""

    def to_plain(self) -> dict[str, Any]:
        """The job as JSON."""
        return self.model_dump(mode="json")


def make_worker_job(
    settings: BaseRolloutSettings,
    model: Path,
    template: Template,
    engine: Engine,
    silent_s: float,
) -> WorkerJob:
    """The job of a run's workers."""
    content = {name: getattr(settings, name) for name in BaseRolloutSettings.model_fields}
    return WorkerJob(
        settings=PlayedSettings.model_validate(content),
        model=model,
        engine=replace(engine.capabilities, tells_experts=False),  # Lines have none.
        tokenizer=TokenizerPrint.take(template),
        vocabulary=_find_vocabulary(model, template),
        silent_s=silent_s,
    )


def _find_vocabulary(model: Path, template: Template) -> int:
    """The number of ids: models often have more than their tokenizers."""
    file = model / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    sizes = (part.get("vocab_size") for part in (config, config.get("text_config") or {}))
    return max(1 + max(template.tokenizer.vocabulary.values()), *(size for size in sizes if isinstance(size, int)), 0)


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()
