"""torchtitan: its Trainer on the processes of a mesh, with its debug model, here on CPUs.

Each process makes torchtitan's own `Trainer` from torchtitan's own options, and trains; the losses
come back to this script. `--tensor` has the processes share each layer (tensor parallelism), by
default each has all of the model and its own data.

    python examples/torchtitan_mesh.py --procs 2 --steps 5

Tokenizer and data are made of examples/data, so nothing is downloaded. On machines with GPUs a
script is not needed: `monarch run --nproc-per-node 8 -m torchtitan.train --job.config_file ...`.

torchtitan 0.2.2 has no CPU among its devices: it asks torch for the accelerator, and that for its
memory. `on_cpu` answers these questions for the CPU. Sharding by FSDP does not work there, since
gloo lacks one of its reductions.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path

from monarch.actor import this_host
from monarch.spmd import run_function

TEXT = Path(__file__).with_name("data") / "founding_documents.txt"


def on_cpu() -> None:
    """Have torchtitan find a CPU, unless there is an accelerator; before it is imported."""
    import torch

    if torch.accelerator.is_available() or "torchtitan" in sys.modules:
        return
    torch.set_num_threads(1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answers = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: types.SimpleNamespace(total_memory=memory),
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
        "set_device": lambda device: None,
        "synchronize": lambda: None,
    }
    device = types.ModuleType("cpu")
    vars(device).update(answers)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: device


def train(options: list[str], cache: str) -> list[float]:
    """Train as one of the ranks, and return the loss of each step."""
    os.environ["HF_DATASETS_CACHE"] = cache  # in place of the home directory
    on_cpu()
    from torchtitan.components.metrics import BaseLogger
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    losses: list[float] = []

    class Losses(BaseLogger):
        def log(self, metrics: dict[str, float], step: int) -> None:
            losses.append(metrics["loss_metrics/global_avg_loss"])

    trainer = Trainer(ConfigManager().parse_args(options))
    trainer.metrics_processor.logger = Losses()
    try:
        trainer.train()
    finally:
        trainer.close()
    return losses


def make_assets(folder: Path) -> list[str]:
    """Train a tokenizer on the text, write both as torchtitan reads them; return the options."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = TEXT.read_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    learner = trainers.BpeTrainer(
        vocab_size=2000,  # the model has 2048
        special_tokens=list(special.values()),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(), learner)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    data = folder / "data"
    data.mkdir()
    samples = [json.dumps({"text": part}) for part in text.split("\n\n")]
    (data / "text.jsonl").write_text("\n".join(samples))
    options = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": folder,
        "job.dump_folder": folder / "out",
        "training.dataset": "c4_test",  # the kind of data: files with a "text"
        "training.dataset_path": data,
        "training.seq_len": 64,
        "training.local_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 0.01,
        "metrics.log_freq": 1,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train torchtitan's debug model on a mesh.")
    parser.add_argument("--procs", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="of the training (default: 5)")
    parser.add_argument("--tensor", action="store_true", help="tensor parallel, not data parallel")
    args = parser.parse_args()
    if min(args.procs, args.steps) < 1:
        parser.error("--procs and --steps must be at least 1")
    for module in ("torchtitan", "triton"):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"No module named {module!r}. Try: pip install 'pymonarch[torchtitan]'")

    kind = "tensor_parallel" if args.tensor else "data_parallel_replicate"
    with tempfile.TemporaryDirectory() as folder:
        options = [
            *make_assets(Path(folder)),
            *("--training.steps", str(args.steps)),
            *("--parallelism.data_parallel_shard_degree", "1"),
            *(f"--parallelism.{kind}_degree", str(args.procs)),
        ]
        procs = this_host().spawn_procs({"gpus": args.procs})
        began = time.perf_counter()
        ranks = run_function(procs, train, options, folder)
        print(f"{args.procs} ranks trained for {time.perf_counter() - began:.1f} s")
        procs.stop().get()
    for step, loss in enumerate(ranks.values()[0], 1):
        print(f"step {step}: loss {loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
