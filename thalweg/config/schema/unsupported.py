"""Blocks of work that is still to come, as DeepSpeed names them: nothing reads them.

They are typed and checked like the others, so that a config that carries them switched off is accepted and a
wrong one is refused; switched on they meet the table ``support.UNSUPPORTED``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from thalweg.config.schema.base import (
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
)

QuantType = Literal["symmetric", "asymmetric"]
Rounding = Literal["nearest", "stochastic"]
Bits = Annotated[PositiveInt, Field(le=32)]


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


class MixedQuantize(Section):
    """A blend of the exact and the quantised value."""

    enabled: bool = False
    quantize_change_ratio: UnitFloat = 0.001


class QuantizeBits(Section):
    """From how many bits to how many."""

    start_bits: Bits = 16
    target_bits: Bits = 16


class QuantizeSchedule(Section):
    """When bits are taken away."""

    quantize_period: PositiveInt = 100
    schedule_offset: NonNegativeInt = 100


class QuantizeAlgo(Section):
    """How values are rounded."""

    q_type: QuantType = "symmetric"
    rounding: Rounding = "nearest"


class QuantizeTraining(Section):
    """MoQ: precision lowered during training."""

    enabled: bool = False
    quantize_verbose: bool = False
    quantizer_kernel: bool = False
    quantize_type: QuantType = "symmetric"
    quantize_groups: PositiveInt = 1
    quantize_bits: QuantizeBits = QuantizeBits()
    quantize_schedule: QuantizeSchedule = QuantizeSchedule()
    quantize_algo: QuantizeAlgo = QuantizeAlgo()
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()
    eigenvalue: Eigenvalue = Eigenvalue()


class GroupParams(Section):
    """The union of the parameters that the groups of the techniques take."""

    start_bits: Bits | None = None
    target_bits: Bits | None = None
    quantization_period: NonNegativeInt | None = None
    bits: Bits | None = None
    dense_ratio: UnitFloat | None = None
    num_heads: PositiveInt | None = None


class CompressionGroup(Section):
    """One set of modules and its parameters."""

    params: GroupParams = GroupParams()
    modules: StrTuple = ("*",)
    related_modules: AnyTuple | None = None


class SharedParams(Section):
    """What the techniques have in common."""

    enabled: bool = False
    schedule_offset: NonNegativeInt = 0
    schedule_offset_end: NonNegativeInt | None = None


class WeightSharedParams(SharedParams):
    """Shared parameters of weight quantisation."""

    quantizer_kernel: bool = False
    quantize_groups: PositiveInt = 1
    quantize_verbose: bool = False
    quantization_type: QuantType = "symmetric"
    rounding: Rounding = "nearest"
    quantize_weight_in_forward: bool = False
    fp16_mixed_quantize: MixedQuantize = MixedQuantize()


class ActivationSharedParams(SharedParams):
    """Shared parameters of activation quantisation."""

    quantization_type: QuantType = "symmetric"
    range_calibration: Literal["static", "dynamic"] = "dynamic"


class SparseSharedParams(SharedParams):
    """Shared parameters of sparse pruning."""

    method: Literal["l1", "topk", "snip_momentum"] = "l1"
    block_pattern: str = "4x1"
    schedule_offset_stride: PositiveInt = 1
    dense_ratio: UnitFloat = 0.1
    excluded_modules: StrTuple = ()


class PruneSharedParams(SharedParams):
    """Shared parameters of row and channel pruning."""

    method: Literal["l1", "topk"] = "l1"


class HeadSharedParams(SharedParams):
    """Shared parameters of head pruning."""

    method: Literal["l1", "topk"] = "topk"
    num_heads: PositiveInt | None = None


class WeightTechnique(Section):
    """Weight quantisation."""

    shared_parameters: WeightSharedParams = WeightSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class ActivationTechnique(Section):
    """Activation quantisation."""

    shared_parameters: ActivationSharedParams = ActivationSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class SparseTechnique(Section):
    """Sparse pruning."""

    shared_parameters: SparseSharedParams = SparseSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class PruneTechnique(Section):
    """Row or channel pruning."""

    shared_parameters: PruneSharedParams = PruneSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class HeadTechnique(Section):
    """Head pruning."""

    shared_parameters: HeadSharedParams = HeadSharedParams()
    different_groups: dict[str, CompressionGroup] = FrozenDict()


class LayerReduction(Section):
    """A student that starts from some layers of its teacher."""

    enabled: bool = False
    keep_number_layer: PositiveInt | None = None
    module_name_prefix: str | None = None
    teacher_layer: IntTuple = ()
    other_module_name: StrTuple = ()


class CompressionTraining(Section):
    """DeepSpeed's compression library."""

    weight_quantization: WeightTechnique = WeightTechnique()
    activation_quantization: ActivationTechnique = ActivationTechnique()
    sparse_pruning: SparseTechnique = SparseTechnique()
    row_pruning: PruneTechnique = PruneTechnique()
    head_pruning: HeadTechnique = HeadTechnique()
    channel_pruning: PruneTechnique = PruneTechnique()
    layer_reduction: LayerReduction = LayerReduction()


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


class Amp(Section):
    """Apex mixed precision, as older configs ask for it."""

    enabled: bool = False
    opt_level: str = "O1"
    cast_model_type: Dtype | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: Literal["dynamic"] | NonNegativeFloat | None = None
    min_loss_scale: NonNegativeFloat | None = None
    max_loss_scale: NonNegativeFloat | None = None


class Nebula(Section):
    """Azure's asynchronous checkpoints."""

    enabled: bool = False
    enable_nebula_load: bool = True
    load_path: str | None = None
    nebula_load_path: str | None = None
    persistent_storage_path: str | None = None
    persistent_time_interval: NonNegativeInt = 100
    num_of_version_in_retention: NonNegativeInt = 2


class ProgressiveLayerDrop(Section):
    """Progressive layer dropping (Zhang and He 2020)."""

    enabled: bool = False
    theta: UnitFloat = 1.0
    gamma: NonNegativeFloat = 0.001


class Comet(Section):
    """The Comet writer."""

    enabled: bool = False
    samples_log_interval: PositiveInt = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class FlopsProfiler(Section):
    """The table of operations per module."""

    enabled: bool = False
    recompute_fwd_factor: NonNegativeFloat = 0.0
    profile_step: PositiveInt = 1
    module_depth: Int64 = -1
    top_modules: PositiveInt = 1
    detailed: bool = True
    output_file: str | None = None
