"""The engine's loader, from what the user gave as ``training_data``."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from thalweg.config import Config
from thalweg.config.schema.base import AUTO, replace_by_path
from thalweg.data.curriculum import Curriculum, CurriculumSampler
from thalweg.data.data_analyzer import open_sample_metric
from thalweg.data.dynamic_batching import BatchSizeLR, DynamicBatchSampler, measure_length, pad_collate
from thalweg.data.loader import StatefulLoader, build_loader, is_iterable_dataset
from thalweg.data.wrap_loader import get_dataloader_options, wrap_dataloader
from thalweg.parallel.sequence.batch_split import BatchSplitter
from thalweg.parallelize import Components
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


class SequenceSplitCollate:
    """Collates a batch and keeps this rank's part of each sequence in it, where the batch has names.

    Labels are shifted before the cut and positions are those of the whole; everything that is by
    token is then as long as the part, so that devices and memory see no more than that.
    """

    def __init__(self, collate_fn: Callable[..., Any], splitter: BatchSplitter) -> None:
        self.collate_fn, self.splitter = collate_fn, splitter

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        return self.splitter.split_batch(batch) if isinstance(batch, Mapping) else batch


def take_batch_size(config: Config, data: Any) -> Config:
    """The config with a DataLoader's batch size as its micro-batch, where it names none and that leaves a choice."""
    if not isinstance(data, DataLoader) or data.batch_size is None:
        return config
    sizes = (config.train_micro_batch_size_per_gpu, config.train_batch_size, config.gradient_accumulation_steps)
    micro, whole, steps = (size in (None, AUTO) for size in sizes)
    if not (micro and (whole or steps)):
        return config
    return replace_by_path(config, {"train_micro_batch_size_per_gpu": data.batch_size})  # type: ignore[return-value]


def build_engine_loader(
    data: Any,
    config: Config,
    rank: int,
    world_size: int,
    collate_fn: Callable[..., Any] | None = None,
    splitter: BatchSplitter | None = None,
) -> Any:
    """A stateful loader of this rank's micro-batches; a DataLoader is adopted, None stays None.

    ``splitter``: cuts them into the parts of ranks that share sequences; a loader that is used as it is
    (one rank, or a sampler that deals out by itself) keeps whole batches, and the model cuts them.

    Raises:
        ValueError: the data cannot give every rank a batch, or a DataLoader's batches are not the config's.
    """
    if data is None:
        return None
    batch_size = int(config.train_micro_batch_size_per_gpu)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": config.seed or 0}
    if config.data_efficiency.curriculum_pools or config.data_efficiency.dynamic_batching is not None:
        loader = _build_efficient_loader(data, config, rank, world_size, collate_fn)
    elif isinstance(data, DataLoader):
        if data.batch_size not in (None, batch_size):
            raise ValueError(
                f"training_data is a DataLoader with batch_size {data.batch_size}, and the config's "
                f"train_micro_batch_size_per_gpu is {batch_size}: make them equal, or leave "
                "train_micro_batch_size_per_gpu out of the config, and the DataLoader's counts"
            )
        loader = wrap_dataloader(data, **ranks)
    else:
        drop_last = config.dataloader_drop_last
        loader = build_loader(data, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn, **ranks)
    if splitter is not None and isinstance(loader, StatefulLoader):
        loader.collate_fn = SequenceSplitCollate(loader.collate_fn, splitter)
    return loader


def _build_efficient_loader(
    data: Any, config: Config, rank: int, world_size: int, collate_fn: Callable[..., Any] | None
) -> StatefulLoader:
    """A loader whose samples a curriculum chooses, or whose micro-batches are made by tokens."""
    section = config.data_efficiency
    sampling, dynamic = section.data_sampling, section.dynamic_batching
    options: dict[str, Any] = {"num_workers": sampling.num_workers, "pin_memory": sampling.pin_memory}
    if isinstance(data, DataLoader):
        own_collate = None if data.collate_fn is default_collate else data.collate_fn
        options, collate_fn, data = get_dataloader_options(data), collate_fn or own_collate, data.dataset
    if is_iterable_dataset(data):
        raise ValueError("data_efficiency.data_sampling chooses samples by number: give a dataset with a length")
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": section.seed}
    ranks |= {"batch_size": int(config.train_micro_batch_size_per_gpu), "drop_last": config.dataloader_drop_last}
    if dynamic is None:
        curriculum = Curriculum(section.curriculum_pools, len(data), int(config.train_batch_size), section.seed)
        epoch_sampler = CurriculumSampler(num_samples=len(data) * sampling.num_epochs, curriculum=curriculum, **ranks)
        return StatefulLoader(data, epoch_sampler, collate_fn=collate_fn, **options)
    assert dynamic.max_tokens is not None
    if dynamic.metrics_path is None:
        lengths = np.fromiter((measure_length(data[index]) for index in range(len(data))), np.int64, len(data))
    else:
        lengths = open_sample_metric(dynamic.metrics_path, "seqlen").astype(np.int64)
    if len(lengths) != len(data):
        raise ValueError(
            f"the analysis in {dynamic.metrics_path} is of {len(lengths)} samples, and training_data has {len(data)}: "
            "analyse this dataset"
        )
    epoch_sampler = DynamicBatchSampler(
        num_samples=len(data),
        lengths=lengths,
        max_tokens=dynamic.max_tokens,
        min_batch_size=dynamic.min_batch_size,
        max_batch_size=dynamic.max_batch_size,
        picking_order=dynamic.sequence_picking_order,
        **ranks,
    )
    num_kept = len(epoch_sampler.plan(0)[0])
    if len(epoch_sampler) == 0:
        raise ValueError(
            f"dynamic_batching leaves no batch for {world_size} ranks: {num_kept} of {len(data)} samples fit in "
            f"max_tokens {dynamic.max_tokens} with min_batch_size {dynamic.min_batch_size}"
        )
    if num_kept < len(data) and rank == 0:
        _log.warning(
            "dynamic_batching leaves out %d of %d samples: they are longer than max_tokens %d, or stand in batches of "
            "fewer than min_batch_size %d", len(data) - num_kept, len(data), dynamic.max_tokens, dynamic.min_batch_size,
        )  # fmt: skip
    return StatefulLoader(data, epoch_sampler, collate_fn=collate_fn or pad_collate, **options)


def connect_loader(loader: Any, components: Components, config: Config) -> None:
    """Let the learning rate follow the loader's batches, where the config says so."""
    dynamic = config.data_efficiency.dynamic_batching
    if loader is None or dynamic is None or dynamic.lr_scaling_method == "none" or components.optimizer is None:
        return
    base_batch_size = int(config.train_batch_size)
    scaling = BatchSizeLR(loader, components.optimizer, base_batch_size, dynamic.lr_scaling_method)
    components.module.register_forward_pre_hook(scaling.before_forward)
    components.window.add_listener(scaling)


def set_custom_schedules(loader: Any, components: Components, schedules: Mapping[str, Callable[[int], int]]) -> None:
    """Give ``custom`` schedules their functions of the step, by metric.

    Raises:
        ValueError: a metric is not in the config.
    """
    curriculum = getattr(getattr(loader, "epoch_sampler", None), "curriculum", None)
    known = components.curricula | (curriculum.schedules if curriculum is not None else {})
    if unknown := sorted(schedules.keys() - known.keys()):
        raise ValueError(f"no curriculum of the config is called {', '.join(unknown)}; there are: {', '.join(known)}")
    for name, get_difficulty in schedules.items():
        known[name].set_custom_get_difficulty(get_difficulty)
