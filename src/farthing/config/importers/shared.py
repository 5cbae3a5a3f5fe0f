"""Keys that many tools have and farthing needs not, by the reason; and what is the same in every tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farthing.config.importers.record import Imported, Why


def uploaded(values: Mapping[str, Any], out: Imported, service: str) -> None:
    """Files of a service by their names there, as files beside the job."""
    for key, to in (("training_file", "data.train"), ("validation_file", "data.eval")):
        if values.get(key):
            file = str(values[key])
            out.put(key, file, to, [{"path": file if "." in file else f"{file}.jsonl"}])
            if "." not in file:
                out.notes.append(f"{file} is a file at {service}: fetch it to {file}.jsonl beside the job")


KERNELS = Why(
    "none",
    "chooses kernels; farthing picks its own by what it measures, and no result hangs on them",
    "attn_implementation _attn_implementation attn_impl liger_* "
    "*liger_kernel* flash_attention flash_attn flash_attn_* flash_optimum xformers_attention sdp_attention "
    "sdpa_varlen s2_attention* eager_attention flex_attention flex_attn_* sage_attention lora_*_kernel use_kernels "
    "use_*_kernels fused_attn_kernel gemma4_hybrid_attn_impl use_scattermoe use_sonicmoe experts_implementation "
    "cut_cross_entropy* chunked_cross_entropy* tiled_mlp* large_head_attention use_v1_kernels shift_attn* moe_grouped_gemm "
    "use_unsloth use_unsloth_gc use_reentrant_gc unsloth_force_compile unsloth_tiled_mlp fast_inference float8_kv_cache "
    "scaling_softmax_kernel use_liger use_flash_attention* kernel_config* "
    "torch_compile_* compile_* use_cache sample_backend init_config* "
    "enable_liger_kernel bias_activation_fusion apply_rope_fusion *_fusion dsv4_* cuda_graph*",
)
GPUS = Why(
    "none",
    "spreads the work over GPUs or off-loads it; here where.gpus and where.strategy say that, or `farthing train --deepspeed "
    "FILE` or `--accelerate FILE` reads it. More GPUs there "
    "meant a larger global batch: multiply it in",
    "deepspeed deepspeed* fsdp fsdp_* fsdp.* fsdp_config* ddp ddp_* *ddp_find* local_rank world_size dp_shard_size "
    "dp_replicate_size tensor_parallel_size expert_parallel_size context_parallel_size context_parapllel_size "
    "sequence_parallel* expert_parallel_* *_parallel_size pipeline_* virtual_pipeline* heads_k_stride ring_attn_func "
    "device_map device_map.* max_memory* use_ray ray_* resources_per_worker* torchdistx_path gpu_memory_limit "
    "accelerator_config* "
    "parallelism_config* deepcompile dist_config* cp_size cp_mode use_mca use_megatron* megatron* use_distributed_optimizer "
    "overlap_* moe_token_dispatcher_type recompute_* kt_* kt_config* use_kt use_hyper_parallel hyper_parallel* "
    "low_cpu_mem_usage lora_on_cpu activation_offloading layer_offloading offload_* qlora_sharded_model_loading "
    "experimental_skip_move_to_device use_dummy_* n_gpu distributed_type num_processes num_machines machine_rank "
    "launcher.* mixed_precision offload_folder use_cpu no_cuda use_mps_device ddp_backend tpu_* average_tokens_across_devices",
)
TRACKING = Why(
    "none",
    "tells a monitoring service; farthing logs to its run folder, and to TensorBoard with train.report_to",
    "wandb* use_wandb mlflow* use_mlflow hf_mlflow* comet* use_comet swanlab* use_swanlab trackio* use_trackio otel* "
    "use_otel* use_tensorboard run_name project project_name logging_dir plot_loss include_tokens_per_second include_tkps "
    "include_num_input_tokens_seen include_effective_tokens* log_level* log_on_each_node logging_first_step logging_strategy "
    "logging_nan_inf_filter disable_tqdm profiler_* profile_* enable_torch_profiler skip_memory_metrics ray_run_name "
    "print_param_status lark_* debug debug_* gradio_* log_completions num_completions_to_print compute_accuracy",
)
SAVING = Why(
    "none",
    "when and how the tool saved; farthing saves by time, weighing what saving costs against what may be lost, and always "
    "everything that an exact resume needs",
    "saves_per_epoch save_strategy save_safetensors save_only_model save_on_each_node save_first_step save_dir "
    "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir ignore_data_skip dynamic_checkpoint* "
    "enable_jit_checkpoint restore_callback_states* tokenizer_save_jinja_files hub_checkpoint* save_hf* resume auto_resume",
)
PUBLISHING = Why(
    "none",
    "publishes, merges or serves the result; `farthing export` writes the adapter or the merged model afterwards",
    "hub_strategy hub_always_push hub_revision push_to_hub_* "
    "hf_use_auth_token use_auth_token hub_token token hf_hub_token ms_hub_token om_hub_token export_* "
    "push_dataset_to_hub merge_lora merge_method nvfp4_merge_aware hf_token secrets volumes* infer_* vllm* sglang* "
    "gpu_memory_utilization enforce_eager max_lora_rank",
)
LOADING = Why(
    "none",
    "how many processes read or cache the data; farthing tokenizes once into a cache that is named by content and reads ahead",
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
    "dataloader_multiprocessing* dataloader_in_order dataset_prepared_path dataset_processes dataset_num_proc "
    "dataset_keep_in_memory preprocessing_num_workers preprocessing_batch_size overwrite_cache tokenized_path cache_dir "
    "data_shared_file_system dataset_shard_* num_dataset_shards_to_save remove_unused_columns streaming buffer_size "
    "streaming_multipack_buffer_size preprocess_iterable preprocess_shards download_mode use_fast_tokenizer "
    "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common max_concurrency num_proc keep_in_memory "
    "pretrain_multipack_buffer_size skip_prepare_dataset pad_to_multiple_of shards shards_idx preprocess_*",
)
PACKED = Why(
    "differs",
    "packing: a step there held as many packed sequences as this job says examples. farthing lays documents end to end "
    "anyway, each seeing only itself, and counts a batch in examples: raise train.global_batch_size to as many as it held",
    "packing neat_packing sample_packing pretraining_sample_concatenation max_packed_sequence_len",
)
PACKING = Why(
    "none",
    "how examples are laid together; farthing always lays documents end to end, each seeing only itself",
    "packing neat_packing packing_strategy sample_packing sample_packing_* eval_sample_packing eval_packing padding_free "
    "batch_flattening pad_to_sequence_len group_by_length multipack_real_batches pretrain_multipack_attn "
    "pretraining_sample_concatenation max_packed_sequence_len length_column_name train_sampling_strategy sortish_sampler "
    "block_diag_attn batching_strategy use_packed_sequences sample_packing_eff_est total_num_tokens total_supervised_tokens "
    "pad_to_max_length",
)
PLUMBING = Why(
    "none",
    "says how that tool runs, not what it learns",
    "do_train do_eval do_predict model_type tokenizer_type type_of_model is_*_derived_model base_model_config "
    "tokenizer_config base_model_ignore_patterns plugins strict gc_steps gc_collect_steps torch_empty_cache_steps "
    "prediction_loss_only eval_do_concat* eval_use_gather* eval_accumulation_steps eval_delay eval_on_start "
    "include_for_metrics batch_eval_metrics label_names trainer_cls trl.use_vllm env* test_value auto_find_batch_size "
    "skip_memory* ddp_timeout past_index tpu_num_cores jit_mode_eval use_ipex use_legacy* print_* "
    "bf16_full_eval fp16_full_eval data_seed fp16_opt_level fp16_backend half_precision_backend upcast_* "
    "gradient_checkpointing_kwargs* activation_checkpointing_kwargs* loss_watchdog_* eval_table_size "
    "eval_max_new_tokens use_local_main_process* capabilities* axolotl_config_path low_memory use_onebitllms "
    "no_* reinit_cache model_class quant_config max_concurrent_* dispatch_batches split_batches",
)
EVALUATION = Why(
    "none",
    "how often or how it evaluated; farthing evaluates once an epoch, or every train.eval_steps; what is learned is the same",
    "evals_per_epoch do_bench_eval bench_* do_causal_lm_eval eval_causal_lm_metrics eval_sequence_len eval_on_each_dataset "
    "eval_num_beams num_beams max_new_tokens generation_* temperature top_p top_k repetition_penalty length_penalty do_sample "
    "use_kv_cache skip_special_tokens generate_samples num_generation_samples do_sample_eval generate_max_len",
)
VISION = Why(
    "none",
    "about images, sound or video, which farthing does not train on; text alone has no use for it",
    "image_* video_* audio_* freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_mm_modules "
    "media_dir crop_to_patches use_audio_in_video processor_kwargs* max_pixels min_pixels vision_* finetune_audio_layers",
)
SPECIAL_TRAINING = Why(
    "differs",
    "another way of training that farthing does not have; without it the losses differ",
    "galore_* use_galore apollo_* use_apollo badam_* use_badam use_adam_mini use_muon lisa_* relora* jagged_* q_galore* "
    "qgalore* mixture_of_depths use_llama_pro use_dft_loss use_eaft* use_asft* eaft_* asft_* loftq_config* loftq_* peft.* "
    "qat.* qat_* qat diffusion.* llmcompressor* fp8 fp8_* load_in_fp8 quantize_embedding quantize_moe_experts "
    "lr_groups* embedding_lr* embedding_learning_rate loraplus_lr_embedding pissa_iter pissa_convert "
    "lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_scheduler_kwargs* lr_div_factor eta_min optim_args "
    "optim_target_modules adam_beta3 adam_epsilon2 dion_* noisy_embedding_alpha moe_aux_loss_coef router_aux_loss_coef "
    "output_router_logits curriculum_sampling use_pose pose_* rank_pattern alpha_pattern layers_to_transform layers_pattern "
    "layer_replication peft_layers* peft_layer_replication lora_rank_pattern lora_alpha_pattern peft_trainable_token_indices "
    "trainable_token_indices exclude_modules lora_target_parameters target_parameters megatron_core fan_in_fan_out_conv "
    "fp32_norms fp32_norm_classes peft_ensure_weight_tying ensure_weight_tying scaling_softmax* train_on_eos train_on_eot "
    "optim_config* use_cce_z_loss loss_type module_dropout qalora* use_qalora eva_config corda_config lora_ga_config "
    "disable_shuffling model_config.* overrides_of_model_* model_init_kwargs* truncation_mode train_on_last_step_only",
)
REWARDS = Why(
    "none",
    "settles preference or reinforcement learning, which farthing does not do",
    "rl_beta dpo_* orpo_* kto_* simpo_gamma cpo_alpha rpo_alpha pref_* ref_model* reward_* ppo_* trl.* ebft.* "
    "center_rewards_coefficient precompute_ref_log_probs num_generations max_prompt_length max_completion_length beta "
    "vllm_* use_vllm missing_eos_penalty teacher_* distillation_* tpo_* total_episodes steps_per_generation "
    "importance_sampling_level stop_token response_length sft_model_path kto* step_separator max_prompt_len top_k_* epsilon "
    "epsilon_high loss_weights ld_alpha",
)

COMMON = (
    KERNELS, GPUS, TRACKING, SAVING, PUBLISHING, LOADING, PACKED, PACKING, PLUMBING, EVALUATION, VISION, SPECIAL_TRAINING,
    REWARDS,
)  # fmt: skip
"""In the order in which they are asked."""

NO_COUNT_OF_GPUS = (
    "written for one GPU: where the original ran on N of them its global batch was N times "
    "per_device_train_batch_size x gradient_accumulation_steps"
)
