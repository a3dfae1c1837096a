"""MII's enumerations and errors."""

from enum import StrEnum


class DeploymentType(StrEnum):
    """How a legacy deployment lives; AML writes files for a cloud, which is not offered."""

    LOCAL = "local"
    AML = "aml"
    NON_PERSISTENT = "non-persistent"


class TaskType(StrEnum):
    """What a legacy deployment does; of these there is text generation."""

    TEXT_GENERATION = "text-generation"
    TEXT_CLASSIFICATION = "text-classification"
    QUESTION_ANSWERING = "question-answering"
    FILL_MASK = "fill-mask"
    TOKEN_CLASSIFICATION = "token-classification"
    TEXT2IMG = "text-to-image"
    ZERO_SHOT_IMAGE_CLASSIFICATION = "zero-shot-image-classification"
    INPAINTING = "text-to-image-inpainting"


class GenerationFinishReason(StrEnum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"
    NONE = "none"


class UnknownArgument(ValueError):
    """A keyword that neither the model's nor the deployment's options have."""


class DeploymentNotFoundError(ValueError):
    """No deployment of that name runs."""
