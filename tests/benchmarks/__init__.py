"""The benchmarks run, and count right."""
