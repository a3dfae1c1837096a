"""Text to documents, documents to tokens, tokens to blocks, blocks to each rank's batches."""

from thalweg.data.batches import cycle
from thalweg.data.corpus import Document, read_folder, split_held_out, stdlib_documents
from thalweg.data.curriculum import Curriculum, CurriculumSampler
from thalweg.data.data_analyzer import DataAnalyzer, DifficultyIndex
from thalweg.data.dynamic_batching import DynamicBatchSampler, pad_collate
from thalweg.data.loader import StatefulLoader, build_loader
from thalweg.data.packing import PackedDataset, open_tokens, pack, save_tokens
from thalweg.data.sampler import EpochSampler, permutation
from thalweg.data.tokenizer import BytePairTokenizer, train_tokenizer
from thalweg.data.wrap_loader import PassthroughLoader, wrap_dataloader

__all__ = [
    "BytePairTokenizer",
    "Curriculum",
    "CurriculumSampler",
    "DataAnalyzer",
    "DifficultyIndex",
    "Document",
    "DynamicBatchSampler",
    "EpochSampler",
    "PackedDataset",
    "PassthroughLoader",
    "StatefulLoader",
    "build_loader",
    "cycle",
    "open_tokens",
    "pack",
    "pad_collate",
    "permutation",
    "read_folder",
    "save_tokens",
    "split_held_out",
    "stdlib_documents",
    "train_tokenizer",
    "wrap_dataloader",
]
