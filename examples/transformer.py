"""Train a small transformer on text, in one process and without a mesh.

It learns to continue the Declaration of Independence and the Constitution of the United States,
character by character. This is the training that examples/transformer_tensor_parallel.py and
examples/transformer_pipeline.py spread over processes: they use the network and the data of this
file, and compare their losses with it.

    python examples/transformer.py
    python examples/transformer.py --steps 500

Needs torch: pip install 'pymonarch[torch]'. With matplotlib it writes a picture of the loss, and
otherwise prints one.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

START = time.perf_counter()
if __name__ == "__main__":
    print("importing torch ...", flush=True)
try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torch]'")

TEXT = Path(__file__).parent / "data" / "founding_documents.txt"
CONTEXT = 64  # characters that the network sees
BATCH = 16  # pieces of text per step
WIDTH = 64
HEADS = 4
LAYERS = 2
REPORT_EVERY = 10  # steps

torch.set_num_threads(1)  # the operations are too small to be shared among cores


def same(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """One layer: attention, then a network of two linear layers.

    Args:
        parts: how many processes share the layer. Each has as many of its heads, and of the columns
            between its two linear layers.

    Attributes:
        spread: called with what all parts read.
        collect: called with what each part contributes; returns the sum.
    """

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.heads = HEADS // parts
        self.spread: Callable[[Tensor], Tensor] = same
        self.collect: Callable[[Tensor], Tensor] = same
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query = nn.Linear(WIDTH, WIDTH // parts, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH // parts, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH // parts, bias=False)
        self.out = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH // parts, bias=False)
        self.down = nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = self.spread(self.norms[0](x))
        parts = (self.query(read), self.key(read), self.value(read))
        by_head = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.collect(self.out(seen.transpose(1, 2).flatten(2)))
        read = self.spread(self.norms[1](x))
        return x + self.collect(self.down(functional.gelu(self.up(read))))


class First(nn.Module):
    """From characters, as numbers, to vectors."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x) + self.position


class Last(nn.Module):
    """From vectors to scores for the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


def transformer(characters: int, seed: int, parts: int = 1) -> nn.Sequential:
    """Return the network; `parts` is that of `Block`.

    Its numbers have 64 bits, so that two ways of computing the same differ by rounding only, also
    after many steps.
    """
    torch.manual_seed(seed)
    blocks = [Block(parts) for _ in range(LAYERS)]
    return nn.Sequential(First(characters), *blocks, Last(characters)).double()


class Text(nn.Module):
    """The text as numbers of characters, in a buffer, so that it moves as networks do."""

    def __init__(self) -> None:
        super().__init__()
        text = TEXT.read_text(encoding="ascii")
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        self.register_buffer("numbers", torch.tensor([numbers[character] for character in text]))
        self.register_buffer("offsets", torch.arange(CONTEXT + 1))

    def pieces(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pieces of text that begin at `starts`, and the character that follows each."""
        pieces = self.numbers[starts.unsqueeze(1) + self.offsets]
        return pieces[:, :-1], pieces[:, 1:]


def starts(text: Text, steps: int, seed: int) -> Iterator[list[int]]:
    """Yield where the pieces of each step begin."""
    last = len(text.numbers) - CONTEXT - 1
    chance = random.Random(seed)
    for _ in range(steps):
        yield [chance.randrange(last) for _ in range(BATCH)]


def loss_of(scores: Tensor, expected: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), expected.flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def train(model: nn.Module, text: Text, steps: int, seed: int) -> Iterator[float]:
    """Train the network in this process; yield the loss of each step."""
    optimizer = adam(model)
    for begin in starts(text, steps, seed):
        given, expected = text.pieces(torch.tensor(begin))
        loss = loss_of(model(given), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def report(losses: Iterator[float], steps: int) -> list[float]:
    """Return the losses, and print some as they come."""
    kept: list[float] = []
    begin = time.perf_counter()
    for loss in losses:
        kept.append(loss)
        if len(kept) % REPORT_EVERY == 0 or len(kept) == steps:
            each = 1000 * (time.perf_counter() - begin) / len(kept)
            print(f"step {len(kept):4}/{steps}  loss {loss:.4f}  {each:.0f} ms/step", flush=True)
    return kept


def compare(losses: list[float], seed: int) -> float:
    """Train in this process, too; return the greatest difference of a loss, relative to it."""
    print("the same in one process, to compare:", flush=True)
    text = Text()
    model = transformer(len(text.characters), seed)
    alone = report(train(model, text, len(losses), seed), len(losses))
    return max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))


def verdict(difference: float) -> int:
    """Print whether the losses are those of one process; return the exit status."""
    print(f"greatest difference of a loss: {difference:.1e}")
    if difference > 1e-6:
        print("error: these are not the losses of one process", file=sys.stderr)
        return 1
    return 0


def draw(losses: list[float], title: str, path: Path) -> None:
    """Write a picture of the losses; without matplotlib, print one."""
    try:
        import matplotlib as mpl
    except ImportError:
        top = max(losses)
        for step in range(0, len(losses), max(1, len(losses) // 20)):
            print(f"{step:5}  {losses[step]:.3f}  {'#' * round(50 * losses[step] / top)}")
        return
    mpl.use("Agg")  # draws to a file and needs no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.set(title=title, xlabel="step", ylabel="training loss per character")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"loss curve: {path}")


def positive(text: str) -> int:
    """Return a number from the command line. Raises ValueError if it is below 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all trainings of the transformer have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--seed", type=int, default=0, help="first weights, order of the text")
    made.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    return made


def main() -> int:
    made = parser("Train a small transformer on text, in one process.")
    made.add_argument("--steps", type=positive, default=100, help="steps of the training")
    args = made.parse_args()
    text = Text()
    model = transformer(len(text.characters), args.seed)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"text: {len(text.numbers):,} characters, weights: {weights:,}", flush=True)
    losses = report(train(model, text, args.steps, args.seed), args.steps)
    draw(losses, "A transformer in one process", args.out / "transformer_loss.png")
    print(f"seconds: {time.perf_counter() - START:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
