"""Eight CPU devices for every test (each says how many it uses), and one compilation cache for all of them."""

import os
import tempfile

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The loop compiles its steps anew in every run, and runs of the command line are processes of their own: what one test
# has compiled, the next one takes from here.
_CACHE = tempfile.TemporaryDirectory(prefix="bert-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
