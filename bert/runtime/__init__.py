"""The process: signals, memory allocation, compilation cache, profiling."""
