"""Keys of verl's that have nothing to say here, each with why."""

from __future__ import annotations

from trainer.verl.loss import ACTOR, CORRECTION
from trainer.verl.model import MODEL, OPTIM
from trainer.verl.rollout import AT

PACKED = "rows are packed by their tokens, whatever they are, and the result does not depend on it"
ALONE = "one process holds the weights"
NOTHING = (
    (ALONE, (f"{ACTOR}.fsdp_config.*", f"{ACTOR}.megatron.*", f"{ACTOR}.strategy", "actor_rollout_ref.hybrid_engine",
             "actor_rollout_ref.nccl_timeout", "actor_rollout_ref.model_engine", f"{MODEL}.use_shm", "data.use_shm",
             f"{ACTOR}.ulysses_sequence_parallel_size", "ray_kwargs.*", "ray_init.*", "transfer_queue.*",
             "trainer.device", "trainer.balance_batch", "trainer.ray_wait_register_center_timeout",
             "trainer.use_legacy_worker_impl", f"{AT}.server.*", f"{AT}.sglang_rollout_mode",
             f"{AT}.layered_summon", f"{AT}.update_weights_bucket_megabytes", f"{AT}.checkpoint_engine.*",
             f"{AT}.nnodes", f"{AT}.n_gpus_per_node")),
    ("the reference is read as the policy is", ("actor_rollout_ref.ref.*",)),
    ("a critic here has no more settings", ("critic.*",)),
    (PACKED, (f"{ACTOR}.use_dynamic_bsz", f"{MODEL}.use_remove_padding", f"{ACTOR}.use_remove_padding",
              f"{ACTOR}.use_prefix_grouper", f"{AT}.log_prob_micro_batch_size",
              f"{AT}.log_prob_micro_batch_size_per_gpu", f"{AT}.log_prob_use_dynamic_bsz",
              f"{AT}.log_prob_max_token_len_per_gpu")),
    ("it is a matter of speed", (f"{MODEL}.use_fused_kernels", f"{MODEL}.use_liger", f"{MODEL}.fused_kernel_options.*",
                                 f"{MODEL}.enable_activation_offload", f"{MODEL}.enable_activation_offloading",
                                 f"{MODEL}.tiled_mlp.*",
                                 f"{ACTOR}.use_torch_compile", f"{ACTOR}.use_fused_kernels",
                                 f"{ACTOR}.entropy_checkpointing", f"{ACTOR}.entropy_from_logits_with_chunking",
                                 "data.dataloader_num_workers", "data.filter_overlong_prompts_workers",
                                 "reward_model.launch_reward_fn_async")),
    ("it is the engine's own affair", (f"{AT}.mode", f"{AT}.dtype", f"{AT}.enforce_eager", f"{AT}.free_cache_engine",
                                       f"{AT}.load_format", f"{AT}.max_num_batched_tokens", f"{AT}.max_num_seqs",
                                       f"{AT}.enable_chunked_prefill", f"{AT}.enable_prefix_caching",
                                       f"{AT}.multi_stage_wake_up", f"{AT}.disable_log_stats", f"{AT}.logprobs_mode",
                                       f"{AT}.cudagraph_capture_sizes", f"{AT}.expert_parallel_size",
                                       f"{AT}.pipeline_model_parallel_size", f"{AT}.engine_kwargs.*",
                                       f"{AT}.skip_tokenizer_init", f"{AT}.skip_dump_dir", f"{AT}.agent.*",
                                       f"{AT}.prometheus.*", f"{AT}.profiler.*", f"{AT}.scheduling_policy")),
    ("a run keeps every rollout, and shows it", (f"{AT}.trace.*", "trainer.log_val_generations",
                                                 "trainer.rollout_data_dir", "trainer.validation_data_dir",
                                                 "global_profiler.*", "actor_rollout_ref.profiler.*",
                                                 "trainer.npu_profile.*",
                                                 "trainer.profile_steps", f"{ACTOR}.profiler.*",
                                                 f"{ACTOR}.calculate_entropy")),
    ("checkpoints hold all that a run goes on with", (f"{ACTOR}.checkpoint.*", "trainer.default_hdfs_dir",
                                                      "trainer.del_local_ckpt_after_load",
                                                      "trainer.max_critic_ckpt_to_keep", "trainer.esi_redundant_time")),
    ("nothing here reads it", ("data.return_raw_input_ids", "data.return_full_prompt", "data.val_batch_size",
                               "data.validation_shuffle", "data.image_patch_size", f"{ACTOR}.data_loader_seed",
                               f"{ACTOR}.rollout_n", f"{OPTIM}.total_training_steps", f"{OPTIM}.optimizer_impl",
                               f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg",
                               f"{ACTOR}.policy_loss.*", f"{ACTOR}.router_replay.*", "algorithm.pf_ppo.*",
                               f"{CORRECTION}.loss_type", f"{ACTOR}.sum_pi_squared_checkpointing", f"{ACTOR}.qat.*",
                               f"{AT}.qat.*",
                               f"{MODEL}.mtp.*", f"{AT}.mtp.*")),
)  # fmt: skip
