"""A tiny causal language model with Hugging Face's Trainer, from random weights, trained with Holdfast.

    python examples/huggingface_lm.py                              # alone
    holdfast run --workers 3 examples/huggingface_lm.py            # three workers: the same weights

Needs `pip install 'holdfast[huggingface]'`, and nothing of the hub. It learns to go on counting, in steps of one to
three.
"""

import argparse

import torch
import transformers

from holdfast.integrations.huggingface import distribute, run_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--batch-size", type=int, default=8, help="sequences in a shard")
parser.add_argument("--accumulate", type=int, default=8, help="shards in a step; at least as many as workers")
args = parser.parse_args()
WORDS, LENGTH = 64, 16


def sequence(number):
    start, by = number % WORDS, 1 + number // WORDS % 3
    return torch.tensor([(start + by * place) % WORDS for place in range(LENGTH)])


rows = [{"input_ids": sequence(number), "labels": sequence(number)} for number in range(3 * WORDS)]
transformers.set_seed(0)
config = transformers.GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
trainer = transformers.Trainer(
    model=transformers.GPT2LMHeadModel(config),
    args=transformers.TrainingArguments(
        output_dir="huggingface_lm",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=20,
        save_strategy="no",  # holdfast run --checkpoint DIR
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=rows,
    eval_dataset=rows[::7],
)
distribute(trainer)  # the one line that is not Hugging Face's
trainer.train()
found = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"loss {found['eval_loss']:.3f}")
    print(f"weights {run_of(trainer).digest()}")
