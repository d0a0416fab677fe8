"""ms-swift's flags, one row each: what is translated by it, and what the guide prints, are the same table."""

from __future__ import annotations

from trainer.flags import said
from trainer.flags.written import PROCESSES
from trainer.verl import model
from trainer.verl.row import How, Row, Table, only
from trainer.verl.table import each, refused

SAME, BETTER, IDLE, REFUSED = How.SAME, How.BETTER, How.IDLE, How.REFUSED

MODEL_AND_DATA = (
    Row(["rlhf_type"], "", REFUSED, "GRPO alone is trained here", "dpo", said.rlhf_type),
    Row(["model", "model_id_or_path"], "model", SAME, "the path of a model's folder", make=model.path),
    Row(["dataset"], "data", SAME, "files; what they end with as the assistant's turn is left out", make=said.data),
    Row(["val_dataset"], "evaluation.data", make=said.held_out),
    Row(["split_dataset_ratio"], "", REFUSED, "", 0,
        only(0, remedy="write --split_dataset_ratio 0, and name a file with --val_dataset")),
    Row(["system"], "system", SAME, "words, or a file that ends in .txt: before every chat that has no such message",
        make=said.system),
    Row(["template"], "", BETTER, "the model's own chat template speaks"),
    Row(["agent_template"], "", BETTER, "the model's own chat template says how calls are written"),
    Row(["enable_thinking"], "template.chat_template_kwargs", make=said.chat_kwargs),
    Row(["truncation_strategy"], "", BETTER, "no prompt is cut: one that leaves no room is counted"),
    Row(["max_length"], "", BETTER, "as above: `limits.rollout_tokens` is the one limit of prompt and answers"),
    Row(["seed"], "seed", default=42),
    Row(["data_seed"], "", IDLE, "the order of tasks is the seed's as well"),
)  # fmt: skip

ROLLOUT = (
    Row(["multi_turn_scheduler"], "stepper", SAME, f"registered in a plug-in file, or {', '.join(said.SCHEDULERS)}",
        make=said.stepper),
    Row(["external_plugins"], "stepper_args", SAME, "with the scheduler's name, `max_turns` and environment",
        make=said.stepper_args),
    Row(["gym_env"], "", SAME, "`stepper_args.gym_env`"),
    Row(["context_manager"], "", SAME, "`stepper_args.context_manager`"),
    Row(["use_gym_env"], "", SAME, "`reward.components.gym_reward`"),
    Row(["max_completion_length"], "limits.turn_tokens", default=512, make=said.turn_tokens),
    Row(["completion_length_limit_scope"], "", REFUSED, "each turn has the whole length", "per_round"),
    Row(["vllm_max_model_len"], "limits.rollout_tokens", SAME, "without it, the engine's context is the limit",
        make=said.rollout_tokens),
    Row(["num_generations"], "n", default=8),
    Row(["temperature"], "sampling.temperature", default=0.9),
    Row(["top_k"], "sampling.top_k", SAME, "less than 1 keeps all; left out before 4.0.3, it was 50", -1,
        lambda value, asked: max(0, value)),
    Row(["top_p"], "sampling.top_p", SAME, "left out before 4.0.3, it was 0.9", 1.0),
    Row(["min_p"], "sampling.min_p", default=0.0),
    Row(["repetition_penalty"], "", REFUSED, "what is sampled is the policy as it is", 1.0,
        only(1.0, 1, remedy="leave it out, and reward what you want: --reward_funcs repetition")),
    Row(["stop_words"], "", REFUSED, "a turn ends where the model ends it",
        make=only(None, remedy="leave it out, and cut the turn in the scheduler's `step`")),
    Row(["vllm_server_pass_dataset"], "", BETTER, "a scheduler always has the row's columns in `data_dict`"),
    Row(["async_generate"], "mode", BETTER, "`one_step_off`: tokens are held against the weights that sampled them",
        False, lambda value, asked: "one_step_off" if value else None),
)  # fmt: skip

REWARD = (
    Row(["reward_funcs"], "reward.components", BETTER, "all attempts of a group are asked about at once, and no others",
        make=said.rewards),
    Row(["reward_weights"], "", SAME, "each component's `weight`"),
    *(Row([name], "", SAME, "the component's `args.options`") for name in ("soft_max_length", "soft_cache_length")),
    Row(["repetition_n_grams"], "", SAME, "the component's `args.options`", 3),
    Row(["repetition_max_penalty"], "", SAME, "the component's `args.options`", -1.0),
    *refused("ask that model over HTTP, in a reward function of yours", None, "reward_model", "reward_model_plugin",
             "reward_adapters", "teacher_model", "reward_model_type", "reward_template"),
    *refused("bring the reward function in a file of yours: --external_plugins", None, "cosine_max_len",
             "cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct",
             "cosine_max_len_value_correct"),
)  # fmt: skip

LOSS = (
    Row(["advantage_estimator"], "algorithm.name", SAME,
        "reinforce_plus_plus is reinforce_pp_baseline; grpo with `scale_rewards: none` dr_grpo, by sequences gspo, "
        "with `loss_type: cispo` cispo", "grpo", said.algorithm),
    Row(["scale_rewards"], "", SAME, "`algorithm.name`"),
    Row(["importance_sampling_level"], "", SAME, "`algorithm.name`", "token"),
    Row(["epsilon"], "algorithm.clip_low", SAME, "with `loss_type: cispo` 1: its weights have no lower bound", 0.2,
        said.clip_low),
    Row(["epsilon_high"], "algorithm.clip_high", SAME,
        "`epsilon` where it is left out; with `loss_type: cispo` 1 less: there it is the bound itself",
        make=said.clip_high),
    Row(["delta"], "algorithm.clip_dual"),
    Row(["beta"], "algorithm.kl", SAME, "k3 in the loss, or k1 in the reward", 0.04, said.kl),
    Row(["kl_in_reward"], "", SAME, "`algorithm.kl.place`"),
    Row(["loss_scale"], "algorithm.credit.rounds", BETTER,
        "it masks among what the policy wrote; nothing else is ever learned from, not with `all` either",
        make=said.rounds),
    Row(["dynamic_sample"], "algorithm.dynamic", default=False),
    Row(["max_resample_times"], "draws", default=3),
    Row(["rollout_importance_sampling_mode"], "algorithm.mismatch", make=said.mismatch),
    Row(["rollout_importance_sampling_threshold"], "", SAME, "`algorithm.mismatch.cap`, or `high`", 2.0),
    *refused("leave it out: a rollout that is cut off is learned from as it is rewarded", False, "overlong_filter"),
    *refused("leave it out", False, "sync_ref_model"),
    *refused("write 1: all tokens are learned from", 1.0, "top_entropy_quantile"),
    *refused("leave it out", None, "off_policy_sequence_mask_delta", "advantage_reweight", "chord_sft_dataset",
             "ref_model", "ref_adapters", "teacher_adapters", "loss_weights"),
    Row(["log_rollout_offpolicy_metrics"], "", BETTER, "it is always measured"),
)  # fmt: skip

UPDATE = (
    Row(["tuner_type", "train_type", "sft_type"], "update.lora", SAME, "`full` moves all weights", "lora", said.lora),
    Row(["lora_rank"], "", SAME, "`update.lora.rank`", 8),
    Row(["lora_alpha"], "", SAME, "`update.lora.alpha`", 32),
    Row(["target_modules"], "", SAME, "`update.lora.targets`"),
    Row(["lora_dropout"], "", BETTER, "none: what samples is what learns", 0.05),
    Row(["learning_rate"], "update.lr", SAME, "left out, 1e-4 with lora and 1e-5 without", make=said.lr),
    Row(["warmup_ratio"], "", SAME, "`update.warmup`, of all steps", 0.0),
    Row(["warmup_steps"], "update.warmup", make=said.warmup),
    Row(["weight_decay"], "update.weight_decay", default=0.1),
    Row(["adam_beta1"], "update.betas", SAME, "with `adam_beta2`", 0.9, said.betas),
    Row(["adam_beta2"], "", SAME, "`update.betas`", 0.95),
    Row(["max_grad_norm"], "update.clip", default=1.0),
    Row(["freeze_vit"], "update.vision", SAME, "frozen, or trained: of a model that sees", True, said.vision),
    Row(["freeze_aligner"], "", SAME, "`update.vision`, with `freeze_vit`", True),
    *refused("leave it out: the words are always learned", False, "freeze_llm"),
    *refused("take it out, and write `max_pixels` into preprocessor_config.json in the model's folder", None,
             "max_pixels", "MAX_PIXELS"),
    Row(["optim"], "", REFUSED, "", "adamw_torch_fused",
        only("adamw_torch_fused", "adamw_torch", remedy="write adamw_torch; there is also Muon: `update.optimizer`")),
    Row(["gradient_checkpointing"], "update.checkpointing", default=True),
    Row(["torch_dtype"], "update.dtype", BETTER, "of products: weights and optimizer stay float32", make=said.dtype),
    Row(["per_device_train_batch_size"], "prompts", SAME,
        "with the number of processes, `steps_per_generation` and `num_generations`", 1, said.prompts),
    Row(["steps_per_generation"], "update.minibatches", SAME, "over `gradient_accumulation_steps`",
        make=said.minibatches),
    *(Row([name], "", SAME, "`prompts` and `update.minibatches`")
      for name in ("gradient_accumulation_steps", "generation_batch_size", *PROCESSES)),
    Row(["num_iterations"], "update.epochs", default=1),
    Row(["max_steps"], "steps", SAME, "there of the optimizer, here of rolling out and learning", make=said.steps),
    Row(["num_train_epochs"], "", SAME, "`steps`, of the rows that the data has", 3.0),
    *refused("leave it out", None, "freeze_parameters", "trainable_parameters", "init_weights", "quant_method",
             "quant_bits", "use_galore", "neftune_noise_alpha"),
)  # fmt: skip

RUN = (
    Row(["output_dir"], "out", SAME, "the run's folder"),
    Row(["save_steps"], "checkpoint.every", BETTER, "left out, as often as it costs little", make=said.each_so_often),
    Row(["save_total_limit"], "checkpoint.keep", SAME, "2 at the least",
        make=lambda value, asked: None if value is None else max(2, value)),
    Row(["eval_steps"], "evaluation.every", SAME, "there of the optimizer", make=said.each_so_often),
    Row(["report_to"], "report", BETTER, "metrics.jsonl and TensorBoard are always written", make=said.report),
    *refused("leave it out, and run `mtrl-train --resume --out RUN`", None, "resume_from_checkpoint", "adapters"),
    *refused("write the columns of the file as they are named here (README, data)", None, "columns"),
    Row(["train_dataloader_shuffle"], "curriculum.shuffled", SAME,
        "each epoch in an order of its own, or as the rows stand", True),
    *refused("leave it out, or turn both off with --train_dataloader_shuffle", True, "dataset_shuffle"),
)  # fmt: skip

TOGETHER = (
    Row(["max_turns"], "limits", SAME, "`assistant_turns`, and as many answers; without a scheduler there is one turn",
        make=said.turns),
    Row(["loss_type"], "algorithm", BETTER,
        "`aggregate`: means are over the whole part of a step, however it is cut to fit into memory", "grpo",
        said.aggregate),
    Row(["lr_scheduler_type"], "update", SAME, "`steps`, `floor` and `fall`: in a cosine or in a line", "cosine",
        said.falls),
)  # fmt: skip
"""Flags that say several settings of one room."""

NOTHING = (
    ("SGLang serves, or the trainer's own engine writes", (
        "use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout",
        "vllm_server_group_port", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_num_seqs",
        "vllm_data_parallel_size", "vllm_pipeline_parallel_size", "vllm_enforce_eager", "vllm_limit_mm_per_prompt",
        "vllm_enable_prefix_caching", "vllm_use_async_engine", "use_async_engine", "vllm_enable_lora",
        "vllm_max_lora_rank", "vllm_disable_custom_all_reduce", "vllm_engine_kwargs", "vllm_mm_processor_cache_gb",
        "infer_backend", "host", "port", "sleep_level", "move_model_batches", "offload_optimizer", "offload_model",
        "enable_flattened_weight_sync")),
    ("one process holds the weights, and rows are packed by their tokens", (
        "deepspeed", "fsdp", "ddp_find_unused_parameters", "ddp_timeout", "padding_free", "packing", "attn_impl",
        "sequence_parallel_size", "use_liger_kernel", "gradient_checkpointing_kwargs", "vit_gradient_checkpointing")),
    ("it is a matter of speed", (
        "dataloader_num_workers", "dataset_num_proc", "load_from_cache_file", "dataloader_prefetch_factor",
        "dataloader_pin_memory", "per_device_eval_batch_size", "streaming", "lazy_tokenize")),
    ("a run keeps every rollout and metric, and shows them", (
        "log_completions", "log_entropy", "logging_steps", "logging_first_step", "logging_dir", "run_name",
        "wandb_log_unique_prompts", "add_version", "create_checkpoint_symlink", "save_only_model", "save_strategy",
        "eval_strategy", "evaluation_strategy", "swanlab_project", "swanlab_exp_name", "wandb_project",
        "num_generations_eval")),
    ("the model's folder says it", (
        "model_type", "use_hf", "model_revision", "hub_token", "model_author", "model_name")),
)  # fmt: skip

TABLE: tuple[Row, ...] = (
    *MODEL_AND_DATA, *ROLLOUT, *REWARD, *LOSS, *UPDATE, *RUN, *TOGETHER,
    *(row for why, names in NOTHING for row in each(names, IDLE, why)),
)  # fmt: skip

SWIFT = Table(
    "ms-swift",
    TABLE,
    {
        "limits.wall_s": (3600.0, "every wait has an end; ms-swift's had none"),
        "limits.tool_calls": (said.AS_LONG_AS_IT_FITS, "a scheduler carries calls out itself"),
        "limits.invalid_turns": (said.AS_LONG_AS_IT_FITS, "and judges them itself"),
        "tools": ([], "tools are the scheduler's affair"),
        "columns.drop_answer": (True, "an assistant's turn at a chat's end is left out, as there"),
    },
)
