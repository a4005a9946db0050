"""transformers.Trainer: a callback for it. Checkpoints have the state of every rank.

A tiny, randomly initialised BERT reads the 64 pixels of a digit as words and classifies the digit. Nothing is
downloaded.

    python examples/huggingface_trainer.py
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py --out run
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py --out run --resume     # as many steps again
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from common import digits, join_or_be_alone, options, summary
from torch.utils.data import TensorDataset

from oktopk.metrics.sinks import MemorySink

sys.path.pop(0)  # this folder: transformers needs the package "accelerate", and there is an accelerate.py here
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from oktopk.integrations.huggingface import OkTopkCallback


def as_text(data: TensorDataset) -> list[dict[str, torch.Tensor]]:
    """Each of 64 pixels is a word: where it is, and whether it is light, grey or dark."""
    images, labels = data.tensors
    words = 3 * torch.arange(64) + (2.99 * images).long()
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def main() -> None:
    parser = options(__doc__, steps=100, density=0.05)
    parser.add_argument("--out", help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()  # otherwise a lone process gets no DDP model, and has nothing to hook

    train, test = map(as_text, digits())
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=3 * 64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,  # so small a model learns faster from a rough start
    )  # fmt: skip
    last = get_last_checkpoint(chosen.out) if chosen.resume else None
    done = int(last.rsplit("-", 1)[1]) if last else 0
    arguments = TrainingArguments(
        output_dir=chosen.out or tempfile.gettempdir(),  # the trainer wants one, even to write nothing there
        use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False, max_steps=done + chosen.steps,
        per_device_train_batch_size=32, learning_rate=2e-3, lr_scheduler_type="constant",
        report_to=[], disable_tqdm=True, logging_strategy="no",
        save_strategy="steps" if chosen.out else "no", save_steps=chosen.steps,
    )  # fmt: skip
    trainer = Trainer(
        BertForSequenceClassification(config), arguments, train_dataset=train, eval_dataset=test,
        compute_metrics=lambda out: {"accuracy": float((out.predictions.argmax(-1) == out.label_ids).mean())},
    )  # fmt: skip
    memory = MemorySink()
    trainer.add_callback(
        OkTopkCallback(
            trainer,
            density=chosen.density,
            warmup_steps=chosen.warmup_steps,
            auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
            sinks=[memory],
        )
    )
    trainer.train(resume_from_checkpoint=last)
    correct = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(summary(arguments.world_size, correct, memory))
    if dist.is_initialized():  # the trainer leaves it; its threads must not outlive the interpreter
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
