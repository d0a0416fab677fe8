"""Words of other frameworks and what they are called here, for the answer to an unknown key."""

from __future__ import annotations

from collections.abc import Mapping

MEANT_SETTINGS: Mapping[str, str] = {
    # models and data
    "model_path": "model", "model_name_or_path": "model", "model_name": "model", "base_model": "model",
    "dataset": "data", "train_files": "data", "train_dataset": "data", "dataset_name": "data",
    "val_files": "evaluation.data", "eval_dataset": "evaluation.data", "system_prompt": "system", "output_dir": "out",
    "run_name": "out", "max_steps": "steps", "total_training_steps": "steps", "num_generations": "n",
    "rollouts_per_example": "n", "group_size": "n", "n_samples_per_prompt": "n", "batch_size": "prompts",
    "train_batch_size": "prompts", "rollout_batch_size": "prompts", "report_to": "report", "logger": "report",
    "wandb": "report: [wandb]", "max_async_level": "max_staleness", "staleness_threshold": "max_staleness",
    "interaction": "curriculum.stages",
    # update
    "lora": "update.lora", "peft_config": "update.lora", "r": "rank", "lora_r": "update.lora.rank",
    "lora_rank": "update.lora.rank", "lora_alpha": "update.lora.alpha", "targets": "target_modules",
    "learning_rate": "update.lr", "lr": "update.lr", "weight_decay": "update.weight_decay", "warmup": "warmup_steps",
    "lr_scheduler_type": "update.lr_scheduler", "grad_clip": "update.max_grad_norm",
    "max_grad_norm": "update.max_grad_norm", "ppo_max_token_len_per_gpu": "update.micro_batch_tokens",
    "gradient_checkpointing": "update.gradient_checkpointing", "freeze_vit": "update.freeze_vision",
    "ppo_epochs": "update.epochs",
    # algorithm
    "beta": "algorithm.kl.coefficient", "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "clip_ratio": "algorithm.clip_low", "loss_type": "algorithm.name", "adv_estimator": "algorithm.name",
    "loss_agg_mode": "algorithm.aggregate", "filter_groups": "algorithm.dynamic_sampling",
    # rollouts
    "max_turns": "limits.assistant_turns", "max_assistant_turns": "limits.assistant_turns", "turns": "assistant_turns",
    "max_completion_length": "limits.response_tokens", "max_response_length": "limits.response_tokens",
    "max_new_tokens": "limits.turn_tokens", "max_tokens": "limits.turn_tokens",
    "max_model_len": "limits.rollout_tokens", "max_prompt_length": "limits.rollout_tokens",
    "temperature": "sampling.temperature", "top_p": "sampling.top_p", "top_k": "sampling.top_k",
    "max_num_seqs": "concurrency.running_requests", "max_running_requests": "concurrency.running_requests",
    "max_concurrent": "concurrency.inflight_rollouts", "chat_template": "template.chat_template",
    # the rest
    "reward_funcs": "reward.components", "reward_function": "reward.components", "rewards": "reward.components",
    "compute_score": "reward.components", "save_steps": "checkpoint.every", "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "eval_steps": "evaluation.every", "test_freq": "evaluation.every",
    "num_gpus": "distributed.ranks", "sequence_parallel": "context_parallel",
    "ulysses_sequence_parallel_size": "distributed.context_parallel", "n_gpus_per_node": "distributed.ranks",
    "ranks": "distributed.ranks",
}  # fmt: skip
"""Only unknown keys are looked up; none of them is read."""
