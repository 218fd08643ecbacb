"""The runtime: schedule, leased buffers, transports, and what ties them."""
