"""Package metadata. The library only: demos and evaluation run from a clone."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "opt_tree" / "__init__.py").read_text())
assert version is not None

setup(
    name="opt_tree",
    version=version[1],
    description="Draft-tree speculative decoding on unmodified transformers models",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["opt_tree", "opt_tree.*"]),
    package_data={"opt_tree": ["demo/*.md", "demo/*/*.json", "demo/*/*.jinja", "demo/*/*.safetensors", "py.typed"]},
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17,<6",
        "accelerate>=1.0",
        "numpy>=2.0",
        "safetensors>=0.5",
        "scipy>=1.11",
        "jaxtyping>=0.3",
        "tqdm>=4.60",
    ],
    extras_require={
        # Imported only where a conversation template is asked for.
        "templates": ["fschat>=0.2.36"],
        "plots": ["matplotlib>=3.8"],
        "test": ["pytest>=8", "hypothesis>=6", "beartype>=0.20", "ruff", "mypy"],
    },
)
