"""The double of Transformer Engine's compiled extension: see ``transformer_engine``."""

import os


def get_cudnn_version() -> int:
    """9.19.0 reads 91900."""
    return int(os.environ.get("FAKE_TE_CUDNN", "91900"))
