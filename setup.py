"""Build the kernel with Cython where that works; everywhere else the same source runs interpreted."""

import os

from setuptools import Extension, setup

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
                    "flintmq.kernel",
                    ["src/flintmq/kernel.py"],
                    depends=["src/flintmq/calls.h", "src/flintmq/checksum.h", "src/flintmq/native.pxd"],
                    include_dirs=["src/flintmq"],
                    extra_compile_args=["-O3"],
                )
            ],
            compiler_directives={"language_level": 3},
        )
        # Set here, not on the Extension above: cythonize() returns new objects without it. A machine
        # without a compiler then installs the interpreted form instead of failing.
        for extension in extensions:
            extension.optional = True

setup(ext_modules=extensions)
