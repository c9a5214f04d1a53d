"""An independent check: EleutherAI's lm-evaluation-harness on a model that rope_extend has patched.

    pip install lm_eval
    python examples/lm_eval_harness.py rope_extend/demo/model 1k path/to/text.txt --method yarn

The harness takes the model object, so nothing is saved. It can run any of its tasks that fits the window.
This example runs the form of its wikitext task on your own text, and our protocol `disjoint`, which gives the
same number.
"""

import argparse
import math
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.units import parse_length

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory or hub id of a checkpoint")
parser.add_argument("length", type=parse_length, help="window to extend it to, such as 32k")
parser.add_argument("text", help="text file, longer than that window")
parser.add_argument("--method", default="yarn")
arguments = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
model = AutoModelForCausalLM.from_pretrained(arguments.model)
patch = rx.extend(model, arguments.length, arguments.method)

# The harness takes the window from the config, `max_position_embeddings`, which the patch keeps in step. But
# methods that follow the length keep the trained window there, because stock loaders need it.
harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=patch.target_length, batch_size=1)
task = {
    "task": "my_text",
    "dataset_path": "text",
    "dataset_kwargs": {"data_files": {"test": arguments.text}, "sample_by": "document"},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "byte_perplexity"}],
}
results = lm_eval.simple_evaluate(model=harness, tasks=[task], bootstrap_iters=0)["results"]["my_text"]
theirs = math.log(results["byte_perplexity,none"])

# The same tokens after the same first token, in nats per byte, as the harness counts.
text = Path(arguments.text).read_text(encoding="utf-8")
ids = torch.tensor([harness.prefix_token_id, *harness.tok_encode(text)])
result = rx.perplexity(model, [rx.Document("text", ids)], [harness.max_length], protocol="disjoint")
ours = math.log(result.ppl[harness.max_length]) * (len(ids) - 1) / len(text.encode())

print(f"{patch.encoding}, windows of {harness.max_length} tokens, {len(ids) - 1} scored")
print(f"lm-evaluation-harness  {theirs:.6f} nats per byte")
print(f"rope_extend, disjoint  {ours:.6f} nats per byte")
