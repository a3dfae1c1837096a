"""Options of work that is still to come: parallel axes, data efficiency, compression, tuning.

They are typed and checked like the others, so that a config that carries them switched off
is accepted and a wrong one is refused; switched on they meet the table ``UNSUPPORTED``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from thalweg.config.schema.base import (
    AUTO,
    AnyDict,
    AnyTuple,
    Dtype,
    FrozenDict,
    Int64,
    IntTuple,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    StrTuple,
    UnitFloat,
    to_tuple,
)


class TPSize(Section):
    """DeepSpeed's inner block of tensor parallelism."""

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = 1


class TPLayerSpec(Section):
    """How the parameters that match ``patterns`` are split."""

    patterns: StrTuple = ()
    partition_type: Literal["row", "column", "skip"] = "column"
    shape: AnyTuple | None = None
    partition_dim: Int64 | None = None
    model_types: StrTuple | None = None


class TPPartition(Section):
    """The user's own table of splits."""

    use_default_specs: bool = True
    layer_specs: Annotated[tuple[TPLayerSpec, ...], BeforeValidator(to_tuple)] = ()


class TensorParallel(Section):
    """Each linear layer split over ``autotp_size`` ranks (0 and 1: not at all)."""

    autotp_size: NonNegativeInt = 0
    dtype: Dtype = "fp16"
    tp_overlap_comm: bool = False
    sequence_parallel: bool = False
    partition_config: TPPartition | None = None
    preset_model: str | None = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = False
    tp: TPSize = TPSize()


class ExpertParallel(Section):
    """Experts spread over ``autoep_size`` ranks."""

    enabled: bool = False
    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    preset_model: str | None = None
    moe_layer_pattern: str | None = None
    router_pattern: str | None = None
    expert_pattern: str | None = None
    use_grouped_mm: bool = True
    disable_triton_grouped_mm: bool = False
    validate_folding_routing: bool = False
    route_norm: bool | None = None
    route_scale: NonNegativeFloat = 1.0
    score_func: str | None = None
    score_apply: str | None = None
    combine_impl: str | None = None
    top_k: PositiveInt | None = None
    routed_scaling_factor: NonNegativeFloat | None = None
    load_balance_coeff: NonNegativeFloat | None = None
    num_expert_groups: PositiveInt | None = None
    num_limited_groups: PositiveInt | None = None
    expert_w1: str | None = None
    expert_w2: str | None = None
    expert_w3: str | None = None
    num_experts_attr: str | None = None
    top_k_attr: str | None = None
    has_shared_experts: bool | None = None
    shared_experts_pattern: str | None = None
    shared_experts_gate_pattern: str | None = None


class PipelineConfig(Section):
    """Layers spread over ``stages`` groups of ranks."""

    stages: PositiveInt = AUTO
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"] = "1f1b"
    micro_batches: PositiveInt = AUTO
    virtual_stages: PositiveInt = 1
    partition: str = "best"
    seed_layers: bool = False
    activation_checkpoint_interval: NonNegativeInt = 0
    pipe_partitioned: bool = True
    grad_partitioned: bool = True
    use_reentrant: bool = True


class HybridEngine(Section):
    """Training and generation in one engine."""

    enabled: bool = False
    max_out_tokens: PositiveInt = 512
    inference_tp_size: PositiveInt = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: PositiveInt = 8
    enable_cuda_graph: bool = False


class WeightQuantization(Section):
    """Weights quantised at load."""

    enabled: bool = True
    num_bits: PositiveInt = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: PositiveInt = 1
    quantized_initialization: AnyDict = FrozenDict()
    post_init_quant: AnyDict = FrozenDict()


class CurriculumSchedule(Section):
    """The union of the parameters of the four schedules."""

    total_curriculum_step: NonNegativeInt | None = None
    difficulty_step: NonNegativeInt | None = None
    root_degree: PositiveInt | None = None
    difficulty: IntTuple | None = None
    max_step: IntTuple | None = None


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: str | None = None
    index_to_metric_path: str | None = None
    difficulty_type: Literal["value", "percentile"] = "value"
    clustering_type: Literal["single_cluster", "schedule_based"] = "single_cluster"
    min_difficulty: NonNegativeInt | None = None
    max_difficulty: NonNegativeInt | None = None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    schedule_config: CurriculumSchedule = CurriculumSchedule()


class SamplingCurriculum(Section):
    """Samples drawn by difficulty."""

    enabled: bool = False
    data_cluster_path: str | None = None
    curriculum_metrics: dict[str, CurriculumMetric] = FrozenDict()


class DynamicBatching(Section):
    """Batches of equal token count."""

    enabled: bool = False
    metrics_path: str | None = None
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    min_batch_size: PositiveInt = 1
    max_batch_size: PositiveInt | None = None
    sequence_picking_order: str = "dataloader"
    max_tokens: PositiveInt | None = None
    samples_per_batch: PositiveInt | None = None
    verbose: bool = False


class DataSampling(Section):
    """How samples are drawn."""

    enabled: bool = False
    num_epochs: PositiveInt = 1000
    num_workers: NonNegativeInt = 0
    pin_memory: bool = False
    curriculum_learning: SamplingCurriculum = SamplingCurriculum()
    dynamic_batching: DynamicBatching = DynamicBatching()


class LTDStep(Section):
    """How fast the kept length grows."""

    require_steps: NonNegativeInt | None = None
    seq_per_step: PositiveInt | None = None


class LTDSchedule(Section):
    """The kept length over time."""

    min_value: NonNegativeInt | None = None
    max_value: NonNegativeInt | None = None
    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    schedule_config: LTDStep = LTDStep()


class LTDLearningRate(Section):
    """A learning rate counted in layer tokens."""

    enabled: bool = False
    total_layer_tokens: NonNegativeInt | None = None
    warmup_type: str | None = None
    warmup_layer_tokens: NonNegativeInt | None = None


class RandomLTD(Section):
    """Random layerwise token dropping (arXiv 2211.11586)."""

    enabled: bool = False
    total_layer_num: NonNegativeInt | None = None
    random_ltd_layer_num: NonNegativeInt | None = None
    random_ltd_layer_id: IntTuple = ()
    model_mask_name: str | None = None
    model_type: Literal["decoder", "encoder"] | None = None
    micro_batch_size: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    random_ltd_schedule: LTDSchedule = LTDSchedule()
    layer_token_lr_schedule: LTDLearningRate = LTDLearningRate()


class DataRouting(Section):
    """Which tokens pass which layers."""

    enabled: bool = False
    random_ltd: RandomLTD = RandomLTD()


class DataEfficiency(Section):
    """DeepSpeed's data efficiency library."""

    enabled: bool = False
    seed: NonNegativeInt = 1234
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()


class CurriculumLearning(Section):
    """Sequence length that grows with training."""

    enabled: bool = False
    curriculum_type: str = "seqlen"
    min_difficulty: NonNegativeInt | None = None
    max_difficulty: NonNegativeInt | None = None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = "fixed_linear"
    schedule_config: CurriculumSchedule = CurriculumSchedule()


class Eigenvalue(Section):
    """Curvature by power iteration."""

    enabled: bool = False
    verbose: bool = False
    max_iter: PositiveInt = 100
    tol: NonNegativeFloat = 1e-2
    stability: NonNegativeFloat = 1e-6
    gas_boundary_resolution: PositiveInt = 1
    layer_name: str = "bert.encoder.layer"
    layer_num: NonNegativeInt = 0


class SparseAttention(Section):
    """Block-sparse attention layouts."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = "fixed"
    block: PositiveInt = 16
    different_layout_per_head: bool = False
    num_local_blocks: PositiveInt = 4
    num_global_blocks: NonNegativeInt = 1
    attention: Literal["unidirectional", "bidirectional"] = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: PositiveInt = 1
    num_random_blocks: NonNegativeInt = 0
    local_window_blocks: IntTuple = (4,)
    num_sliding_window_blocks: NonNegativeInt = 3
    global_block_indices: IntTuple = (0,)
    global_block_end_indices: IntTuple | None = None


class Elasticity(Section):
    """Batch sizes that hold over a range of world sizes."""

    enabled: bool = False
    max_train_batch_size: PositiveInt = 2000
    micro_batch_sizes: IntTuple = (2, 4, 6)
    min_gpus: PositiveInt = 1
    max_gpus: PositiveInt = 10000
    min_time: NonNegativeInt = 0
    version: UnitFloat = 0.2
    prefer_larger_batch: bool = True
    ignore_non_elastic_batch_info: bool = False
    num_gpus_per_node: PositiveInt = 1
    model_parallel_size: PositiveInt = 1


class AutotuningModelInfo(Section):
    """What the tuner may know of the model beforehand."""

    profile: bool = False
    num_params: NonNegativeInt | None = None
    hidden_size: NonNegativeInt | None = None
    num_layers: NonNegativeInt | None = None


class Autotuning(Section):
    """A search over configs."""

    enabled: bool = False
    fast: bool = True
    results_dir: str = "autotuning_results"
    exps_dir: str = "autotuning_exps"
    overwrite: bool = True
    start_profile_step: NonNegativeInt = 3
    end_profile_step: NonNegativeInt = 5
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    metric_path: str | None = None
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    tuner_early_stopping: NonNegativeInt = 5
    tuner_num_trials: PositiveInt = 50
    arg_mappings: AnyDict | None = None
    max_train_batch_size: PositiveInt | None = None
    min_train_batch_size: PositiveInt = 1
    max_train_micro_batch_size_per_gpu: PositiveInt = 1024
    min_train_micro_batch_size_per_gpu: PositiveInt = 1
    num_tuning_micro_batch_sizes: PositiveInt = 3
    mp_size: PositiveInt = 1
    model_info: AutotuningModelInfo | None = None
    model_info_path: str | None = None
