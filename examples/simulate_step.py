"""Simulate one training step on many GPUs, without any: its time, its memory, and a picture.

Ten linear layers are trained with data parallelism. The gradients are averaged over all devices,
first after the backward pass, then beside it, on a stream of their own: as soon as the gradient of
a layer is there, a second stream borrows it.

    python examples/simulate_step.py --hosts 8 --gpus 8 --trace step.json

Open the trace of the second step at https://ui.perfetto.dev. Needs torch: pip install
'pymonarch[torch]'.
"""

import argparse
import sys

print("importing torch ...", flush=True)
try:
    import torch

    from monarch import Simulator, Stream, grad_generator
    from monarch.simulator import CostModel
except ImportError as missing:
    sys.exit(f"{missing}. Try: pip install 'pymonarch[torch]'")

LAYERS = 10


def step(model: torch.nn.Module, batch: torch.Tensor, stream: Stream | None) -> None:
    """Train one step; average the gradients on `stream`, beside the backward pass."""
    parameters = list(model.parameters())[::-1]  # the last layer's gradients come first
    loss = model(batch).pow(2).mean()
    gradients, borrows = [], []
    for gradient in grad_generator(loss, parameters):
        gradients.append(gradient)
        if stream is not None:
            borrowed, borrow = stream.borrow(gradient, mutable=True)
            with stream.activate():
                borrowed.reduce_(("host", "gpu"), "avg")
            borrows.append(borrow)
    for gradient in gradients if stream is None else ():
        gradient.reduce_(("host", "gpu"), "avg")
    for borrow in borrows:
        borrow.drop()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)


def positive(text: str) -> int:
    """Return a number from the command line. Raises ValueError if it is below 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    arguments = argparse.ArgumentParser(
        description="Simulate a training step on many GPUs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    arguments.add_argument("--hosts", type=positive, default=8, help="number of hosts")
    arguments.add_argument("--gpus", type=positive, default=8, help="GPUs on each host")
    arguments.add_argument("--width", type=positive, default=8192, help="width of a layer")
    arguments.add_argument("--batch", type=positive, default=8192, help="rows on each GPU")
    arguments.add_argument("--trace", default="", help="file for the trace of the second step")
    given = arguments.parse_args()

    simulator = Simulator(
        given.hosts, given.gpus, runtime=CostModel(), simulate_mode="simulate_with_report_only"
    )
    with simulator.mesh.activate():
        layers = [torch.nn.Linear(given.width, given.width, bias=False) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        batch = torch.rand(given.batch, given.width, dtype=torch.bfloat16)
        simulator.step()
        for name, stream in (("after", None), ("beside", Stream("communication"))):
            step(model, batch, stream)
            picture = simulator.gantt(64)
            if given.trace:
                simulator.write_trace(given.trace)
            seconds, megabytes = simulator.step()
            print(f"averages {name} the backward pass: {1e3 * seconds:.1f} ms", end=", ")
            print(f"at most {megabytes / 1e3:.1f} GB on a device")
            print(picture)


if __name__ == "__main__":
    main()
