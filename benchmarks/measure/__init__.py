"""What the benchmarks of this folder share: pages, peers, rounds and tables."""
