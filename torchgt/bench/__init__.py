"""Measuring: step timers, peak memory, the machine's description, and benchmarks that write rows."""
