"""Makes of what a trainer was given the settings of a run, and the Python objects that they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.errors import ConfigError
from gateway.tool_table import Source
from mtrl_plugins.scripts.conversions import UNLIMITED
from mtrl_plugins.scripts.key_table import Keys, PlacedValue, Rule
from mtrl_plugins.scripts.translate import Translation, translate
from mtrl_plugins.trl.conversions import ROWS, TRL_TABLE
from mtrl_plugins.trl.environments import Environments, EnvironmentStepper, EnvironmentToolset
from mtrl_plugins.trl.function_tools import CallerTools, make_function_source, make_function_tools, make_source
from mtrl_plugins.trl.reward_functions import PREFIX, Progress, RewardFunctions, name_functions, unique_name
from mtrl_plugins.trl.rows import EMPTY_PROMPT, PROMPT, DatasetTasks, open_dataset
from trainer.hub import find_model
from trainer.pretrained import load_tokenizer
from trainer.train.job import JobObjects
from trainer.train.settings import DEMO, TrainSettings

INITIAL_MODEL = "initial_model"
"""The folder in a run in which a loaded model is saved."""
TEXT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def name_model(model: Any, run: Path, processing_class: Any = None) -> str:
    """The setting `model` for what a trainer was given. A loaded model is saved into the run's folder first."""
    if model is None:
        return DEMO
    if isinstance(model, str | Path):
        if processing_class is not None:
            remedy = "leave it out: the model's folder has its own"
            raise ConfigError("goes with a loaded model only", field="processing_class", remedy=remedy)
        return str(find_model(model))
    if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
        remedy = "pass a model's folder, and adapters as `peft_config`"
        raise ConfigError(f"is a {type(model).__name__}", field="model", remedy=remedy)
    folder = run / INITIAL_MODEL
    if not (folder / "config.json").exists():
        if processing_class is None:
            remedy = "pass the model's tokenizer or processor, or the model's folder"
            raise ConfigError("is needed beside a loaded model", field="processing_class", remedy=remedy)
        model.save_pretrained(folder)
        processing_class.save_pretrained(folder)
    return str(folder)


def text_template(model: str, prompts: Iterable[str]) -> str:
    """A chat template for prompts that are texts: the policy continues them as they are.

    It begins with the token that the model's tokenizer puts before every text, if there is one. Raises ConfigError if a
    chat template was applied to the prompts already, since control tokens in data are read as plain text.
    """
    try:
        tokenizer = load_tokenizer(Path(model))
    except (OSError, ValueError):  # The demo, or a folder whose problems are reported later.
        return TEXT_TEMPLATE
    for prompt in prompts:
        if token := next((token for token in tokenizer.all_special_tokens if token in prompt), None):
            problem = f"a prompt holds the control token {token!r}, as if a chat template was applied to it"
            raise ConfigError(problem, field="train_dataset", remedy="pass the messages themselves as `prompt`")
    begins = bool(tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    return ("{{ bos_token }}" if begins else "") + TEXT_TEMPLATE


PLACE = "args"
"""Where errors say that an argument is."""


def translate_arguments(args: Any, peft_config: Any = None, rows: int | None = None) -> Translation:
    """The settings for the trainer's arguments; `rows` is the length of the data, if it has one.

    Raises ConfigErrors with all arguments that are unknown or not supported.
    """
    keys: Keys = {name: PlacedValue(value, PLACE) for name, value in read_arguments(args).items()}
    if rows is not None:
        keys[ROWS] = PlacedValue(rows, PLACE)
    if peft_config is not None:
        keys["peft_config"] = PlacedValue(peft_config, "GRPO")
    table = dataclasses.replace(TRL_TABLE, rules=(*TRL_TABLE.rules, Rule([ROWS])))
    return translate(keys, table)


def read_arguments(args: Any) -> dict[str, Any]:
    """The arguments by name; of a dataclass, those that differ from its defaults."""
    if args is None:
        return {}
    if isinstance(args, Mapping):
        values = dict(args)
    elif dataclasses.is_dataclass(args) and not isinstance(args, type):
        values = {name: getattr(args, name) for name in _changed_fields(args)}
    elif isinstance(args, SimpleNamespace):
        values = dict(vars(args))
    else:
        remedy = "pass a GRPOConfig, or a dict with its names"
        raise ConfigError(f"is a {type(args).__name__}", field=PLACE, remedy=remedy)
    return {str(name): _to_plain(value) for name, value in values.items()}


def _changed_fields(args: Any) -> Iterable[str]:
    """The fields of a dataclass that differ from those of a new instance, which fills in defaults in the same way."""
    fields = [field for field in dataclasses.fields(args) if field.init]
    required = {
        field.name: getattr(args, field.name)
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    try:
        default = type(args)(**required)
    except Exception:  # boundary: a class of the user's own may refuse what it is given
        default = None
    for each in fields:
        before = _declared_default(each) if default is None else getattr(default, each.name)
        if each.name in required or not _equal(getattr(args, each.name), before):
            yield each.name


def _declared_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _equal(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except Exception:  # boundary: values of any kind, such as arrays, may not compare to a truth value
        return False


def _to_plain(value: Any) -> Any:
    """Enumerations, such as transformers' schedulers, as their values; tuples as lists."""
    if isinstance(value, Enum):
        return value.value
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value


TRAIN, EVALUATION = "train_dataset", "eval_dataset"
PROMPT_ROOM = 1024
"""Tokens for the system prompt, the tools and what an environment observes, besides the longest prompt."""


class JobParts:
    """The settings and objects of a run. Everything that can be checked without the model is checked at once."""

    def __init__(  # noqa: PLR0913 - what TRL's trainer is given
        self,
        caller_tools: CallerTools,
        *,
        args: Any,
        reward_funcs: Any,
        train_dataset: Any,
        eval_dataset: Any,
        tools: Any,
        environment_factory: Any,
        peft_config: Any,
        settings: Mapping[str, Any],
    ) -> None:
        self.tools = caller_tools
        self.functions, self.files = _split_tools(tools)
        make_function_tools(self.functions, self.tools)
        self.environments = Environments(environment_factory, self.tools) if environment_factory else None
        self.rewards = name_functions(reward_funcs)
        self._weights = _read_weights(args, self.rewards)
        for name, function in self.environments.reward_functions().items() if self.environments else ():
            self.rewards[unique_name(name, self.rewards)] = function
        if not self.rewards:
            remedy = "pass reward_funcs, or an environment with `get_reward`"
            raise ConfigError("is missing", field="reward_funcs", remedy=remedy)
        most = _stream_rows(args)
        rows = None if train_dataset is None else open_dataset(train_dataset, TRAIN, most)
        arguments = translate_arguments(args, peft_config, None if rows is None else len(rows))
        self._values = dict(arguments.settings)
        self.train = self._make_tasks(self._own_rows() if rows is None else rows, TRAIN)
        self.evaluation = (
            None if eval_dataset is None else self._make_tasks(open_dataset(eval_dataset, EVALUATION), EVALUATION)
        )
        self._overrides = dict(settings)
        self.has_text_prompts = self._check_prompts()

    @property
    def _all_tasks(self) -> list[DatasetTasks]:
        return [tasks for tasks in (self.train, self.evaluation) if tasks is not None]

    @property
    def has_tools(self) -> bool:
        """Whether the policy may call anything."""
        files = self.files or self._overrides.get("tools") or self._overrides.get("mcp")
        return bool(self.functions or self.environments or files)

    @property
    def out(self) -> Path | None:
        """The run's folder, if the arguments name one."""
        out = self._overrides.get("out", self._values.get("out"))
        return None if out is None else Path(out)

    def _own_rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows with an empty prompt, for an environment that makes its tasks itself."""
        if self.environments is None or self.environments.has_choice:
            remedy = "pass rows; they may be left out where there is one environment, which makes its own tasks"
            raise ConfigError("is missing", field=TRAIN, remedy=remedy)
        return [{PROMPT: EMPTY_PROMPT} for _ in range(self._values["prompts"])]

    def _make_tasks(self, rows: Sequence[Mapping[str, Any]], name: str) -> DatasetTasks:
        tools = None
        if self.environments is not None and self.environments.has_choice:
            shared = tuple(function.__name__ for function in self.functions)
            tools = {str(key): (*shared, *methods) for key, methods in self.environments.methods.items()}
        return DatasetTasks(rows, name, tools, needs_prompt=self.environments is None)

    def _check_prompts(self) -> bool:
        """Whether the prompts are texts. Tools need chats, and both cannot be mixed."""
        types: set[type] = set().union(*(tasks.prompt_types for tasks in self._all_tasks))
        if types == {list}:
            return False
        if len(types) > 1 or self.has_tools:
            problem = "some prompts are texts" if len(types) > 1 else "prompts are texts, which have no place for tools"
            remedy = 'write every prompt as a chat: [{"role": "user", "content": "..."}]'
            raise ConfigError(problem, field=TRAIN, remedy=remedy)
        return True

    def settings(self, model: str, out: Path | None) -> TrainSettings:
        """The settings of a run with this model in this folder."""
        own: dict[str, Any] = {
            "model": model,
            "data": TRAIN,
            "objects": tuple(self._object_names()),
            "tools": self.files[0] if len(self.files) == 1 else tuple(self.files),
            "reward": {"components": {name: self._component(name) for name in self.rewards}},
            "limits": {"rollout_tokens": self._rollout_tokens()},
        }
        if self.evaluation is not None:
            own["evaluation"] = {"data": EVALUATION}
        if not self.has_tools:
            own["template"] = {"parser": "plain_text"}
        if self.has_text_prompts:
            prompts = (str(row[PROMPT]) for row in self.train.rows)
            own["template"] |= {"chat_template": text_template(model, prompts)}
        values = merge(merge(own, self._values), self._overrides)
        return TrainSettings.model_validate(values | ({"out": out} if out else {}))

    def _object_names(self) -> list[str]:
        names = [TRAIN, *([EVALUATION] if self.evaluation is not None else [])]
        names += [f"{PREFIX}.{name}" for name in self.rewards]
        names += [f"tools.{function.__name__}" for function in self.functions]
        return [*names, *(["environment_factory"] if self.environments else [])]

    def _component(self, name: str) -> dict[str, Any]:
        """The settings of a reward component. Functions have their own deadline, which begins when they do."""
        weight = self._weights.get(name, 1.0)
        return {"function": f"{PREFIX}.{name}", "batched": True, "weight": weight, "timeout_s": UNLIMITED}

    def _rollout_tokens(self) -> int:
        """Room for the longest prompt and all that follows: a text has no more tokens than bytes."""
        longest = max(tasks.longest_prompt for tasks in self._all_tasks)
        return ceil((longest + PROMPT_ROOM) / PROMPT_ROOM) * PROMPT_ROOM + int(
            self._values["limits"]["response_tokens"]
        )

    def objects(self, settings: TrainSettings) -> JobObjects:
        """The objects that the settings name, for one run or evaluation."""
        steps_per_epoch = len(self.train) / settings.prompts
        updates = settings.update.minibatches * settings.update.epochs
        progress = Progress(updates, settings.steps * updates, steps_per_epoch, settings.steps / steps_per_epoch)
        columns = list(dict.fromkeys(name for tasks in self._all_tasks for name in tasks.columns))
        rewards = RewardFunctions(self.rewards, self.tools.caller, columns, self.tools.timeout_s, progress)
        tasks: dict[str, Callable[[], DatasetTasks]] = {TRAIN: lambda: self.train}
        if (evaluation := self.evaluation) is not None:
            tasks[EVALUATION] = lambda: evaluation
        make_stepper = None
        if (environments := self.environments) is not None:
            if settings.stepper is not None:
                raise ConfigError("cannot be combined with environments", field="stepper", remedy="remove one of them")
            make_stepper = partial(EnvironmentStepper, environments)
            rewards.environments, rewards.release = environments.of_attempts, environments.release
        return JobObjects(tasks, self._make_sources, rewards.as_given(), make_stepper)

    def _make_sources(self) -> Sequence[Source]:
        sources = [make_function_source(self.functions, self.tools)] if self.functions else []
        if self.environments is not None:
            toolset = EnvironmentToolset(self.environments)
            source = make_source("trl environments", toolset, self.tools, self.environments.async_names)
            sources.append(replace(source, in_order=True))  # They change one state.
        return sources


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with others put over them."""
    merged = dict(values)
    for name, value in overrides.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _split_tools(tools: Any) -> tuple[list[Any], list[str]]:
    """Functions, and the names of folders and files of tools."""
    listed = [] if tools is None else [tools] if isinstance(tools, str | Path) else list(tools)
    files = [str(tool) for tool in listed if isinstance(tool, str | Path)]
    return [tool for tool in listed if not isinstance(tool, str | Path)], files


def _read_weights(args: Any, rewards: Mapping[str, Any]) -> dict[str, float]:
    """The weight of each reward function."""
    weights = read_arguments(args).get("reward_weights")
    if weights is None:
        return {}
    if len(weights) != len(rewards):
        problem = f"{len(weights)} weights for {len(rewards)} reward functions ({', '.join(rewards)})"
        raise ConfigError(problem, file="args", field="reward_weights", remedy="pass one weight for each")
    return {name: float(weight) for name, weight in zip(rewards, weights, strict=True)}


def _stream_rows(args: Any) -> int | None:
    """How many rows of a stream the run draws; None if that is not known."""
    steps = read_arguments(args).get("max_steps") or 0
    if steps <= 0:
        return None
    values = translate_arguments(args).settings
    return int(values["steps"]) * int(values["prompts"])
