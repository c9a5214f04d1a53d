"""Fine-tune a model on a longer window: `rope-extend finetune`, as a script for launchers.

One process:        python scripts/finetune.py rope_extend/demo/recipe.yaml --output-dir runs/yarn
One per GPU:        torchrun --nproc-per-node 8 scripts/finetune.py configs/llama_7b_32k_yarn.yaml
With accelerate:    accelerate launch --config_file configs/accelerate/fsdp2.yaml scripts/finetune.py RECIPE
Two CPU processes:  ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 scripts/finetune.py ...
"""

import sys

from rope_extend.cli import main

if __name__ == "__main__":
    main(["finetune", *sys.argv[1:]])
