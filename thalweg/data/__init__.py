"""Text to documents, documents to tokens, tokens to blocks, blocks to each rank's batches."""

from thalweg.data.batch_feed import cycle
from thalweg.data.corpus import stdlib_documents
from thalweg.data.curriculum import Curriculum, CurriculumSampler
from thalweg.data.data_analyzer import DataAnalyzer, DifficultyIndex
from thalweg.data.dynamic_batching import DynamicBatchSampler, pad_collate
from thalweg.data.loader import StatefulLoader, build_loader
from thalweg.data.packing import PackedDataset, open_tokens, pack
from thalweg.data.tokenizer import train_tokenizer

__all__ = [
    "Curriculum", "CurriculumSampler", "DataAnalyzer", "DifficultyIndex", "DynamicBatchSampler", "PackedDataset",
    "StatefulLoader", "build_loader", "cycle", "open_tokens", "pack", "pad_collate", "stdlib_documents",
    "train_tokenizer",
]  # fmt: skip
