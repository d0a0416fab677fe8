"""All arguments of TRL's GRPOTrainer and GRPOConfig, and what each becomes; the migration guide prints this table."""

from __future__ import annotations

from mtrl_plugins.trl import argument_values as values
from mtrl_plugins.trl import loss_arguments as loss
from mtrl_plugins.verl.key_rule import Effect, KeyTable, Rule, allow_only
from mtrl_plugins.verl.table import make_rules, refuse

SAME, CHANGED, IGNORED, FIXED = Effect.SAME, Effect.CHANGED, Effect.IGNORED, Effect.FIXED

TRAINER = (
    Rule(["model"], "", SAME,
         "a folder as `save_pretrained` writes it, a model's name on the Hugging Face hub, or a loaded model, which is "
         "saved into the run's folder; without one, a tiny model that is built for the demo"),
    Rule(["processing_class"], "", SAME, "only beside a loaded model; a folder has its own"),
    Rule(["reward_funcs"], "", SAME,
         "functions, async ones too, called once per group rather than once per batch; a reward model has to be asked "
         "in a function of yours"),
    Rule(["reward_processing_classes"], "", FIXED, "reward models are not loaded"),
    Rule(["train_dataset"], "", SAME, "a data set of `datasets`, a list of rows, or anything that gives rows"),
    Rule(["eval_dataset"], "", SAME, "the same; a single one"),
    Rule(["tools"], "", SAME, "functions; besides, folders and files of the gateway's tools, by their names"),
    Rule(["environment_factory"], "", SAME, "a callable, or a mapping of them and a column `environment`"),
    Rule(["rollout_func"], "", FIXED, "write a stepper: `settings={\"stepper\": ...}`"),
    Rule(["callbacks"], "", FIXED, "metrics are in metrics.jsonl and in `trainer.state.log_history`"),
    Rule(["optimizers"], "", FIXED, "the optimizer is `adamw` or `muon`: `settings={\"update\": ...}`"),
    Rule(["quantization_config"], "", FIXED, "there is no quantised training"),
    Rule(["peft_config"], "update.lora", SAME, "a `LoraConfig`: `r`, `lora_alpha` and `target_modules`; no dropout",
         convert=values.lora),
)  # fmt: skip

MODEL = (
    Rule(["model_init_kwargs"], "update.dtype", CHANGED,
         "only `dtype`, which is that of matrix products; weights and optimizer stay float32", None,
         values.model_dtype),
    *refuse("remove it: no code of a model's folder is run", False, "trust_remote_code"),
    *refuse("remove it", None, "router_aux_loss_coef"),
    Rule(["disable_dropout"], "", IGNORED, "there is no dropout: what samples and what is trained are the same"),
    Rule(["cast_lm_head_to_fp32"], "", IGNORED, "weights are float32"),
    Rule(["chat_template_kwargs"], "template.chat_template_kwargs", convert=values.chat_template_kwargs),
    Rule(["seed"], "seed", default=42),
    Rule(["shuffle_dataset"], "curriculum.shuffled", SAME, "each epoch in a new order", True),
    *refuse("write random, or shuffle_dataset=False", "random", "train_sampling_strategy"),
    Rule(["remove_unused_columns"], "", IGNORED, "every column is passed to reward functions"),
)  # fmt: skip

ROLLOUT = (
    Rule(["num_generations"], "n", default=8),
    Rule(["num_generations_eval"], "", CHANGED, "an evaluation tries each task once, by the most likely tokens"),
    Rule(["max_completion_length"], "limits", SAME, "`response_tokens`: of all turns and answers together", 512,
         values.token_limits),
    Rule(["max_tool_calling_iterations"], "limits.assistant_turns", SAME, "one more than the iterations",
         convert=values.assistant_turns),
    Rule(["temperature"], "sampling.temperature", default=1.0),
    Rule(["top_p"], "sampling.top_p", default=1.0),
    Rule(["top_k"], "sampling.top_k", default=0),
    Rule(["min_p"], "sampling.min_p"),
    *refuse("remove it: the policy is sampled as it is", None, "generation_kwargs", "vllm_structured_outputs_regex"),
    *refuse("write 1.0, or use a reward", 1.0, "repetition_penalty"),
    Rule(["vllm_max_model_length"], "limits.rollout_tokens", SAME,
         "by default `max_completion_length` and room for the longest prompt"),
)  # fmt: skip

BATCHES = (
    Rule(["per_device_train_batch_size"], "prompts", CHANGED,
         "x `steps_per_generation` / `num_generations`, or `generation_batch_size` / `num_generations`; what fits into "
         "memory at a time is `update.tokens`", 8, values.prompts),
    Rule(["generation_batch_size"], "", SAME, "`prompts` and `update.minibatches`"),
    Rule(["steps_per_generation"], "update.minibatches", SAME, "divided by `gradient_accumulation_steps`",
         convert=values.minibatches),
    Rule(["gradient_accumulation_steps"], "", SAME, "`prompts` and `update.minibatches`", 1),
    Rule(["num_iterations"], "update.epochs", default=1),
    Rule(["max_steps"], "steps", CHANGED,
         "optimizer updates there; here a step rolls out, and makes `update.minibatches` x `update.epochs` updates", -1,
         values.steps),
    Rule(["num_train_epochs"], "", SAME, "`steps`, computed from the number of rows", 3.0),
)  # fmt: skip

LOSS = (
    Rule(["loss_type"], "algorithm", SAME,
         "`name` and `aggregate`; with "
         "`importance_sampling_level=\"sequence\"` it is `gspo`, with `scale_rewards=\"none\"` `dr_grpo`, with "
         "`\"batch\"` `reinforce_pp_baseline`, which is close; `sapo`, `luspo` and `vespo` are not here",
         "dapo", loss.algorithm),
    Rule(["importance_sampling_level"], "", SAME, "`algorithm.name`", "token"),
    Rule(["scale_rewards"], "", SAME, "`algorithm.name`", "group"),
    Rule(["epsilon"], "algorithm.clip_low", SAME, "1 for CISPO, whose weights have no lower bound", 0.2, loss.clip_low),
    Rule(["epsilon_high"], "algorithm.clip_high", SAME, "`epsilon` by default; for CISPO 1 less", None, loss.clip_high),
    Rule(["delta"], "algorithm.clip_dual"),
    Rule(["beta"], "algorithm.kl", SAME, "`estimator: k3+`; `k3` without `use_bias_correction_kl`", 0.0, loss.kl),
    Rule(["use_bias_correction_kl"], "", SAME, "`algorithm.kl.estimator`", True),
    Rule(["mask_truncated_completions"], "algorithm.credit.rounds", SAME, "tokens of a truncated rollout weigh nothing",
         False, loss.credit_rounds),
    Rule(["reward_weights"], "", SAME, "`weight` of each component"),
    *refuse("write sum_then_normalize", "sum_then_normalize", "multi_objective_aggregation"),
    Rule(["vllm_importance_sampling_correction"], "algorithm.mismatch", SAME, "with `use_vllm`", True, loss.mismatch),
    Rule(["vllm_importance_sampling_mode"], "", SAME, "`algorithm.mismatch`", "sequence_mask"),
    Rule(["vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"], "", SAME,
         "`algorithm.mismatch.cap` and `high`", 3.0),
    Rule(["vllm_importance_sampling_clip_min"], "", SAME, "`algorithm.mismatch.low`"),
    *refuse("remove it; `algorithm.mismatch.reject` is the nearest", None, "off_policy_mask_threshold"),
    *refuse("remove it: the reference stays the model of the beginning", False, "sync_ref_model"),
    *refuse("write 1.0: all tokens are trained", 1.0, "top_entropy_quantile"),
    *refuse("remove it; an alarm tells when the entropy is gone", 0.0, "entropy_coef"),
    *refuse("remove it; an alarm tells when the entropy is gone", False, "use_adaptive_entropy"),
)  # fmt: skip

UPDATE = (
    Rule(["learning_rate"], "update.lr", default=1e-6),
    Rule(["weight_decay"], "update.weight_decay", default=0.0),
    Rule(["adam_beta1"], "update.betas", SAME, "with `adam_beta2`", 0.9, values.betas),
    Rule(["adam_beta2"], "", SAME, "`update.betas`", 0.999),
    *refuse("write 1e-8", 1e-8, "adam_epsilon"),
    Rule(["max_grad_norm"], "update.clip", default=1.0),
    Rule(["warmup_steps"], "update.warmup", SAME, "a number, or a share of all updates", 0, values.warmup),
    Rule(["warmup_ratio"], "", SAME, "`update.warmup`"),
    Rule(["lr_scheduler_type"], "update", SAME, "`steps`, `floor` and `fall`: linear or cosine", "linear",
         values.lr_schedule),
    *refuse("remove it", None, "lr_scheduler_kwargs", "neftune_noise_alpha", "optim_args", "optim_target_modules"),
    Rule(["optim"], "", FIXED, "", "adamw_torch_fused",
         allow_only(*values.OPTIMIZERS, remedy="write adamw_torch; Muon is `settings={\"update\": ...}`")),
    Rule(["gradient_checkpointing"], "update.checkpointing", default=True),
    Rule(["bf16"], "update.dtype", SAME, "of matrix products; by default bfloat16 where the GPU has it",
         convert=values.dtype),
    *refuse("use bf16", False, "fp16", "fp16_full_eval"),
    *refuse("remove it", 0.0, "label_smoothing_factor"),
)  # fmt: skip

RUN = (
    Rule(["output_dir"], "out", SAME, "the run's folder; by default the next free one in `runs/`"),
    Rule(["save_steps"], "checkpoint.every", CHANGED, "by default as often as it costs little time",
         convert=values.save_interval),
    Rule(["save_strategy"], "", CHANGED, "with anything but `steps`, the run decides; the last step is always saved",
         "steps"),
    Rule(["save_total_limit"], "checkpoint.keep", SAME, "at least 2", convert=values.keep_checkpoints),
    Rule(["eval_strategy"], "evaluation.every", CHANGED, "a few tasks are tried, by the most likely tokens", "no",
         values.evaluation_interval),
    Rule(["eval_steps"], "", SAME, "`evaluation.every`"),
    Rule(["logging_steps"], "", CHANGED, "every step is logged", 10),
    Rule(["report_to"], "report", SAME, "metrics.jsonl and TensorBoard are always written", "none", values.report),
    Rule(["resume_from_checkpoint"], "", SAME, "`train(resume_from_checkpoint=True)`"),
)  # fmt: skip

IGNORED_ARGUMENTS = (
    ("the engine is SGLang or the embedded one: `settings={\"engine\": ...}`", (
        "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url",
        "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "use_transformers_continuous_batching",
        "transformers_continuous_batching_config", "use_transformers_paged", "cache_implementation")),
    ("`distributed` says how ranks share the weights, and sequences are packed by tokens", (
        "ds3_gather_for_generation", "pad_to_multiple_of", "deepspeed", "fsdp", "fsdp_config", "accelerator_config",
        "parallelism_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "average_tokens_across_devices",
        "auto_find_batch_size", "use_liger_kernel", "liger_kernel_config")),
    ("it only affects speed or memory", (
        "tf32", "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs",
        "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cache", "torch_empty_cache_steps",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "dataloader_drop_last", "bf16_full_eval", "use_cpu", "full_determinism", "skip_memory_metrics",
        "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics")),
    ("a run always keeps its rollouts and metrics", (
        "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts", "logging_strategy",
        "logging_first_step", "logging_dir", "log_on_each_node", "logging_nan_inf_filter", "log_level",
        "log_level_replica", "include_num_input_tokens_seen", "disable_tqdm", "run_name", "project",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "save_only_model", "save_on_each_node",
        "enable_jit_checkpoint", "debug",
        "include_for_metrics", "prediction_loss_only")),
    ("nothing in GRPOTrainer depends on it", (
        "do_train", "do_eval", "do_predict", "label_names", "length_column_name", "per_device_eval_batch_size",
        "ignore_data_skip", "restore_callback_states_from_checkpoint")),
    ("`seed` determines the order of rows as well", ("data_seed",)),
    ("an evaluation during the run begins before the first step", ("eval_on_start", "eval_delay")),
    ("used by arguments that are refused", (
        "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
        "vespo_lambda_neg", "ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef_min", "entropy_coef_max",
        "entropy_coef_delta", "entropy_target")),
)  # fmt: skip

UPLOADS = tuple(
    rule
    for default, names in (
        (False, ("push_to_hub", "hub_always_push", "load_best_model_at_end")),
        (None, ("hub_token", "hub_private_repo", "hub_model_id", "hub_revision", "log_completions_hub_repo",
                "metric_for_best_model", "greater_is_better")),
        ("every_save", ("hub_strategy",)),
    )
    for rule in refuse("upload the folder yourself, after training", default, *names)
)  # fmt: skip

RULES: tuple[Rule, ...] = (
    *TRAINER, *MODEL, *ROLLOUT, *BATCHES, *LOSS, *UPDATE, *RUN, *UPLOADS,
    *(rule for note, names in IGNORED_ARGUMENTS for rule in make_rules(names, IGNORED, note)),
)  # fmt: skip

TRL_TABLE = KeyTable(
    "TRL",
    RULES,
    {
        "limits.wall_s": (3600.0, "rollouts have a time limit here, and none in TRL"),
        "limits.tool_calls": (values.UNLIMITED, "the number of calls is not limited there"),
        "limits.invalid_turns": (values.UNLIMITED, "invalid calls do not end a rollout there"),
    },
)
