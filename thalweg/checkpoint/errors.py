"""What can go wrong with a checkpoint, one class for each thing that a caller may do about it."""


class CheckpointError(RuntimeError):
    """A save or a load failed; nothing that was committed before is lost."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint where one was asked for."""

    def __str__(self) -> str:  # FileNotFoundError would print errno fields that are not there
        return str(self.args[0]) if self.args else ""


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk differ from those that were committed; the text names file and tensor."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is sound but does not fit the model, the optimiser or the request."""


class RestartLoopError(CheckpointError):
    """Starts of a job from its newest checkpoints have crashed again and again: it is not started anew."""


class UnserializableStateError(CheckpointError, ValueError):
    """A snapshot holds something that the format cannot keep; the text names its path."""


ERRORS_BY_NAME: dict[str, type[CheckpointError]] = {
    cls.__name__: cls for cls in (CheckpointError, *CheckpointError.__subclasses__())
}
