"""PagedKV: an embeddable, paged, tiered KV cache for LLM inference.

A block table maps a sequence's logical pages to fixed-size slots of a numpy pool; cold pages go
to a Zarr v3 store on disk. See the README for examples.
"""

import logging

from pagedkv.admission import AdmissionPolicy, AdmitAll, AdmitLikely, AdmitSeenTwice
from pagedkv.cache import PagedKVCache
from pagedkv.codec import Codec, Int8, Lossless, Raw
from pagedkv.errors import (
    ClosedError,
    CorruptPageError,
    FormatVersionError,
    PagedKVError,
    PageNotFoundError,
    PoolExhaustedError,
    SpecMismatchError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreTimeoutError,
    TraceError,
)
from pagedkv.explanation import Explanation, StopReason
from pagedkv.fingerprint import fingerprint_files
from pagedkv.format import PageEntry, StoreRow
from pagedkv.loading import LoadHandle
from pagedkv.policies.arc import ARC
from pagedkv.policies.clock import CLOCK
from pagedkv.policies.fifo import FIFO
from pagedkv.policies.lfu import LFU
from pagedkv.policies.lru import LRU
from pagedkv.policies.lru2 import LRU2
from pagedkv.policies.reuse_index import ReuseIndex
from pagedkv.policies.s3fifo import S3FIFO
from pagedkv.policies.sieve import SIEVE
from pagedkv.policies.two_queue import TwoQueue
from pagedkv.policy import EvictionPolicy
from pagedkv.prefix import PageKeys, page_keys
from pagedkv.recording import Recording
from pagedkv.sequence import Sequence
from pagedkv.spec import KVSpec, PageKey, format_nbytes, parse_nbytes
from pagedkv.stats import CacheStats
from pagedkv.store import PageStore

__version__ = "0.1.0.dev0"

__all__ = [
    "ARC",
    "CLOCK",
    "FIFO",
    "LFU",
    "LRU",
    "LRU2",
    "S3FIFO",
    "SIEVE",
    "AdmissionPolicy",
    "AdmitAll",
    "AdmitLikely",
    "AdmitSeenTwice",
    "CacheStats",
    "ClosedError",
    "Codec",
    "CorruptPageError",
    "EvictionPolicy",
    "Explanation",
    "FormatVersionError",
    "Int8",
    "KVSpec",
    "LoadHandle",
    "Lossless",
    "PageEntry",
    "PageKey",
    "PageKeys",
    "PageNotFoundError",
    "PageStore",
    "PagedKVCache",
    "PagedKVError",
    "PoolExhaustedError",
    "Raw",
    "Recording",
    "ReuseIndex",
    "Sequence",
    "SpecMismatchError",
    "StopReason",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "StoreRow",
    "StoreTimeoutError",
    "TraceError",
    "TwoQueue",
    "fingerprint_files",
    "format_nbytes",
    "page_keys",
    "parse_nbytes",
]

logging.getLogger("pagedkv").addHandler(logging.NullHandler())
