"""Perplexity against a naive loop that holds all logits in float64, and what evaluation may cost."""

import json
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend.data import Document
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import PerplexityResult, perplexity
from rope_extend.evaluation import perplexity as module_perplexity  # noqa: F401
