"""Trains a drafter from a YAML recipe: answers the prompts with the target, trains, saves. The same as `dspark train`,
for launchers that want a script: `accelerate launch training/train.py training/configs/qwen3-4b.yaml`."""

import typer

from dspark_hf.cli.train import train

if __name__ == "__main__":
    typer.run(train)
