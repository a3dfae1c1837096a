"""Options of data efficiency: curricula, batches by tokens, layers that see some of the tokens."""

from typing import Literal

from thalweg.config.schema.base import (
    FrozenDict,
    IntTuple,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    ignored,
    unsupported,
)
from thalweg.config.schema.unsupported import block, without_effect

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
_BY_SHAPE = "masks and positions are told from their shapes, and tokens keep their order"


class ScheduleConfig(Section):
    """The pace: the first three options for fixed_linear and fixed_root, the last two for fixed_discrete."""

    total_curriculum_step: PositiveInt | None = None
    difficulty_step: PositiveInt | None = None
    root_degree: PositiveFloat | None = None
    difficulty: IntTuple = ()
    max_step: IntTuple = ()


class CurriculumSchedule(Section):
    """From which difficulty to which, and how."""

    min_difficulty: NonNegativeInt | None = None
    max_difficulty: NonNegativeInt | None = None
    schedule_type: ScheduleType = "fixed_linear"
    schedule_config: ScheduleConfig = ScheduleConfig()


class CurriculumLearning(CurriculumSchedule):
    """Sequences that are cut short at first (DeepSpeed's older form)."""

    enabled: bool = False
    curriculum_type: Literal["seqlen"] = "seqlen"


class CurriculumMetric(CurriculumSchedule):
    """One metric of difficulty, by the index that ``DataAnalyzer`` wrote of it."""

    index_to_sample_path: str | None = None
    index_to_metric_path: str | None = None
    difficulty_type: Literal["value", "percentile"] = "value"
    clustering_type: Literal["single_cluster", "schedule_based"] = "single_cluster"


class MetricCurricula(Section):
    """Samples from easy to hard, by one metric or several."""

    enabled: bool = False
    data_cluster_path: str | None = ignored(None, "which samples are easy enough follows from the index")
    curriculum_metrics: dict[str, CurriculumMetric] = FrozenDict()


class DynamicBatching(without_effect("data_efficiency.data_sampling.dynamic_batching")):
    """Micro-batches of at most ``max_tokens`` tokens, the learning rate in proportion to their samples."""

    enabled: bool = False
    metrics_path: str | None = None
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    min_batch_size: PositiveInt = 1
    max_batch_size: PositiveInt | None = None
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    max_tokens: PositiveInt | None = None
    samples_per_batch: PositiveInt | None = ignored(None, "max_tokens and max_batch_size say how many there are")


class DataSampling(Section):
    """Which samples make a batch."""

    enabled: bool = False
    num_epochs: PositiveInt = 1000
    num_workers: NonNegativeInt = 0
    pin_memory: bool = False
    curriculum_learning: MetricCurricula = MetricCurricula()
    dynamic_batching: DynamicBatching = DynamicBatching()


class RandomLTDPace(Section):
    """Steps until every token is kept, and the number that kept tokens are a multiple of."""

    require_steps: PositiveInt | None = None
    seq_per_step: PositiveInt | None = None


class RandomLTDSchedule(Section):
    """How many tokens the layers see."""

    min_value: PositiveInt | None = None
    max_value: PositiveInt | None = None
    schedule_type: Literal["fixed_linear"] = "fixed_linear"
    schedule_config: RandomLTDPace = RandomLTDPace()


_LayerTokenSchedule = block(
    enabled=unsupported(False, "set it to false; DeepSpeed has not built it either"),
    total_layer_tokens=None,
    warmup_type=None,
    warmup_layer_tokens=None,
)


class RandomLTD(Section):
    """Layers that see a random part of the tokens (arXiv 2211.11586)."""

    enabled: bool = False
    total_layer_num: PositiveInt | None = None
    random_ltd_layer_num: NonNegativeInt | None = None
    random_ltd_layer_id: IntTuple = ()
    model_mask_name: str | None = ignored(None, _BY_SHAPE)
    model_type: Literal["decoder", "encoder"] | None = ignored(None, _BY_SHAPE)
    micro_batch_size: PositiveInt | None = ignored(None, "the engine knows it")
    global_batch_size: PositiveInt | None = ignored(None, "the engine knows it")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"
    random_ltd_schedule: RandomLTDSchedule = RandomLTDSchedule()
    layer_token_lr_schedule: _LayerTokenSchedule = _LayerTokenSchedule()  # type: ignore[valid-type]


class DataRouting(Section):
    """Which layers a token passes."""

    enabled: bool = False
    random_ltd: RandomLTD = RandomLTD()


class DataEfficiency(Section):
    """Less data, or less of it in each layer, for the same loss."""

    enabled: bool = False
    seed: NonNegativeInt = 1234
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()

    @property
    def curriculum_metrics(self) -> dict[str, CurriculumMetric]:
        """The metrics, none where a switch above them is off."""
        section = self.data_sampling.curriculum_learning
        return section.curriculum_metrics if self.enabled and self.data_sampling.enabled and section.enabled else {}

    @property
    def curriculum_pools(self) -> dict[str, CurriculumMetric]:
        """Those that choose samples; the others cut sequences."""
        metrics = self.curriculum_metrics.items()
        return {name: metric for name, metric in metrics if metric.clustering_type == "schedule_based"}

    @property
    def dynamic_batching(self) -> DynamicBatching | None:
        """The section, if all its switches are on."""
        section = self.data_sampling.dynamic_batching
        return section if self.enabled and self.data_sampling.enabled and section.enabled else None

    @property
    def random_ltd(self) -> RandomLTD | None:
        """The section, if all its switches are on."""
        section = self.data_routing.random_ltd
        return section if self.enabled and self.data_routing.enabled and section.enabled else None
