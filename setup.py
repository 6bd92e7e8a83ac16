"""Build the kernel with Cython where that works; everywhere else the same sources run interpreted."""

import os
import re
import tomllib
from glob import glob
from pathlib import Path

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


def long_description() -> str:
    """Return the README with absolute links: a package index shows it without the files beside it."""
    source = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = Path("README.md").read_text()
    # Relative only: an address of another site has a colon, a link within the page begins with #.
    text = re.sub(r"(!\[[^]]*\])\(([^):#]+)\)", rf"\1({source}/raw/main/\2)", text)
    text = re.sub(r"((?:src|srcset)=\")([^\":]+)\"", rf"\1{source}/raw/main/\2\"", text)
    return re.sub(r"(?<!!)(\[[^]!]*\])\(([^):#]+)((?:#[^)]*)?)\)", rf"\1({source}/blob/main/\2\3)", text)


setup(
    ext_modules=extensions,
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
