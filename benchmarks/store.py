"""The page store at the speed of the disk: writes, reads, tiny pages, opening; beside plain files.

    python benchmarks/store.py [--part NAME] [--rounds 5] [--folder DIR] [--json]

``docs/benchmarks.md`` says what each case measures, and how.
"""

from measure.catalogue import million_pages
from measure.compare import run
from measure.int8 import int8_store
from measure.reads import cold_reads, warm_reads
from measure.tiny import tiny_pages
from measure.writes import durable_writes

PARTS = {
    "durable-writes": durable_writes,
    "warm-reads": warm_reads,
    "cold-reads": cold_reads,
    "int8": int8_store,
    "tiny-pages": tiny_pages,
    "million-pages": million_pages,
}

if __name__ == "__main__":
    run("The page store beside plain files", PARTS)
