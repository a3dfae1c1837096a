"""DeepSpeed's data pipeline: what a program calls beside the config, which here says everything."""

from typing import Any

from torch import nn

from thalweg.data.data_analyzer import DataAnalyzer


class DeepSpeedDataAnalyzer(DataAnalyzer):
    """The analyser without the threads of the reduction, which is one sort here."""

    def __init__(self, *args: Any, num_threads_reduce: int = 1, specific_threads: Any = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def convert_to_random_ltd(model: nn.Module, convert_type: type) -> nn.Module:
    """The engine as it is: ``initialize`` has prepared the layers that the config names."""
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """The state dict, in which random-LTD leaves no names."""
    return model.state_dict()
