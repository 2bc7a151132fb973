"""Eight simulated devices for every test, and an error for every warning that our own code gives rise to."""

import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start, too
# Simulated devices wait for each other; on a busy machine one may be late, and XLA would end the process after 40 s.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # no test finds a plan of the last run

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# Many tests compile the same programs; those of the last run may be used too.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache/jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_configure(config):
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        config.addinivalue_line("filterwarnings", f"error:::{name}")
