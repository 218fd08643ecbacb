"""Benchmarks. Each prints a table and writes `benchmarks/results/NAME.json`. Run from the repository's root."""
