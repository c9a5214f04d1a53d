"""Quiet, offline, and one thread per test process: the parallel runs share the cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
