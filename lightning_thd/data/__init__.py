"""Datasets and paths -> packed, planned, resumable loaders."""

from lightning_thd.data.datamodule import THDDataModule
from lightning_thd.data.loader import BatchMaker, PlannedSteps, THDLoader
from lightning_thd.data.read.text import ByteTokenizer, StdlibText, read_documents, stdlib_documents
from lightning_thd.data.store.index import build_index
from lightning_thd.data.store.tokens import TokenStore
from lightning_thd.models import register_thd

__all__ = [
    "BatchMaker",
    "ByteTokenizer",
    "PlannedSteps",
    "StdlibText",
    "THDDataModule",
    "THDLoader",
    "TokenStore",
    "build_index",
    "read_documents",
    "stdlib_documents",
]

# The model that trains on this data may be built with "thd" before anything else is imported.
register_thd()
