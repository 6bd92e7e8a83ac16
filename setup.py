"""Build the kernel with Cython where that works; everywhere else the same sources run interpreted."""

import os
from glob import glob

from setuptools import Extension, setup

KERNEL = "src/flintmq/kernel"
MODULES = ("lane", "frames", "heap", "columns", "records", "spans")

extensions: list[Extension] = []
if os.environ.get("FLINTMQ_PURE") != "1":
    try:
        from Cython.Build import cythonize
    except ImportError:
        pass
    else:
        extensions = cythonize(
            [
                Extension(
                    f"flintmq.kernel.{name}",
                    [f"{KERNEL}/{name}.py"],
                    depends=[*glob(f"{KERNEL}/*.h"), *glob(f"{KERNEL}/*.pxd")],
                    include_dirs=[KERNEL],
                    extra_compile_args=["-O3"],
                )
                for name in MODULES
            ],
            compiler_directives={"language_level": 3},
        )
        # Set here, not on the Extension above: cythonize() returns new objects without it. A machine
        # without a compiler then installs the interpreted form instead of failing.
        for extension in extensions:
            extension.optional = True

setup(ext_modules=extensions)
