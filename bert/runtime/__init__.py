"""Process-level code: signals, memory allocation, compilation cache, profiling."""
