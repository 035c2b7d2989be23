"""Loops and models as people write them, in torch alone: `test_loops.py` runs each of them twice.

A loop returns tensors and numbers. It knows no mesh. Weights and data are made from numbers
(`made`, `filled`), since each process of a mesh draws random numbers of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Loop = Callable[[], Sequence[Any]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """Add a loop."""
    LOOPS[function.__name__] = function
    return function


def made(*shape: int, seed: float = 1.0) -> Any:
    """Return numbers between -1 and 1 in this shape, the same each time."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 1.7 + seed).reshape(
        shape
    )


def filled(module: Any) -> Any:
    """Return the module with weights that are the same each time."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(made(*parameter.shape, seed=number) * 0.3)
    return module


def network() -> Any:
    """Return a small network."""
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def trained(model: Any, optimizer: Any, steps: int = 4, after: Any = None) -> list[Any]:
    """Train, and return losses and weights."""
    x, y = made(6, 4), made(6, 2, seed=5)
    losses = []
    for _ in range(steps):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
        if after is not None:
            after()
    return [*losses, *model.parameters()]


# -- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.01},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "LBFGS": {"lr": 0.5, "max_iter": 3},
    "Muon": {"lr": 0.01},
}


def _optimizer(name: str) -> Loop:
    def run() -> Sequence[Any]:
        model = network()
        parameters = list(model.parameters())
        if name == "Muon":
            parameters = [parameter for parameter in parameters if parameter.dim() == 2]
        optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])
        return trained(model, optimizer)

    run.__name__ = f"optimizer_{name}"
    return run


for _name in OPTIMIZERS:
    if hasattr(torch.optim, _name):
        loop(_optimizer(_name))


@loop
def optimizer_state_is_saved_and_loaded() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    again = torch.optim.Adam(model.parameters(), lr=0.01)
    again.load_state_dict(saved)
    return [*trained(model, again, 2), again.state_dict()["state"][0]["step"].item()]


@loop
def groups_with_learning_rates_of_their_own() -> Sequence[Any]:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return trained(model, torch.optim.AdamW(groups, lr=0.01))


@loop
def learning_rate_is_a_tensor() -> Sequence[Any]:
    model = network()
    return trained(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)))


# -- schedulers, clipping, scaling ----------------------------------------------------------------

SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "CosineAnnealingLR": {"T_max": 4},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 8},
    "LinearLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
}


def _scheduler(name: str) -> Loop:
    def run() -> Sequence[Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULERS[name])
        return [*trained(model, optimizer, after=scheduler.step), scheduler.get_last_lr()[0]]

    run.__name__ = f"scheduler_{name}"
    return run


for _name in SCHEDULERS:
    loop(_scheduler(_name))


@loop
def scheduler_on_a_plateau() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    x, y = made(6, 4), made(6, 2, seed=5)
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return [optimizer.param_groups[0]["lr"], *model.parameters()]


@loop
def gradients_are_clipped() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = made(6, 4), made(6, 2, seed=5)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True))
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
    return [*norms, *model.parameters()]


@loop
def gradients_are_accumulated() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(4):
        loss = F.mse_loss(model(made(6, 4, seed=number)), made(6, 2)) / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return list(model.parameters())


@loop
def losses_are_scaled() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(made(6, 4)), made(6, 2))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), *model.parameters()]


@loop
def computed_with_shorter_numbers() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(made(6, 4)), made(6, 2))
        loss.backward()
        optimizer.step()
    return list(model.parameters())


@loop
def averages_of_weights() -> Sequence[Any]:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    moving = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        average.update_parameters(model)
        moving.update_parameters(model)

    trained(model, optimizer, after=update)
    return [*average.parameters(), *moving.parameters()]


@loop
def exponential_average_by_hand() -> Sequence[Any]:
    model = network()
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def update() -> None:
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)

    trained(model, optimizer, after=update)
    return list(average.parameters())


# -- numbers in the script ------------------------------------------------------------------------


@loop
def best_loss_is_kept() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    best, total = float("inf"), 0.0
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(made(6, 4)), made(6, 2))
        loss.backward()
        optimizer.step()
        total += loss.item()
        if loss < best:
            best = float(loss)
    return [best, total, f"{loss:.3f}"]


@loop
def steps_until_the_loss_is_small() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps = 0
    while steps < 50:
        optimizer.zero_grad()
        loss = F.mse_loss(model(made(6, 4)), made(6, 2) * 0.1)
        loss.backward()
        optimizer.step()
        steps += 1
        if loss < 0.05:
            break
    return [steps, loss]


@loop
def accuracy_is_counted() -> Sequence[Any]:
    model = network()
    right = 0
    for number in range(3):
        predicted = model(made(6, 4, seed=number)).argmax(1)
        right += (predicted == (made(6) > 0).long()).sum().item()
    return [right, bool(torch.isfinite(model(made(6, 4))).all())]


@loop
def rows_are_chosen_by_a_mask() -> Sequence[Any]:
    x = made(5, 3)
    positive = x[x > 0]
    rows = x[x[:, 0] > 0]
    return [positive.sum(), rows.mean(), *torch.unique((x * 3).long()), (x > 0).nonzero()]


@loop
def step_counters() -> Sequence[Any]:
    step = torch.tensor(0)
    scale = torch.ones(2) * 3
    for _ in range(3):
        step += 1
        scale.mul_(0.5)
    return [step.item(), scale.sum().item(), int(step) // 2, step == 3, math.pow(2, step)]


# -- layers ---------------------------------------------------------------------------------------


def _layer(name: str, layer: Callable[[], Any], *shape: int, call: Any = None) -> None:
    def run() -> Sequence[Any]:
        module = filled(layer())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        results = []
        for _ in range(2):
            x = made(*shape).requires_grad_()
            out = call(module, x) if call is not None else module(x)
            if isinstance(out, tuple):
                out = out[0]
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            results += [out, x.grad]
        return [*results, *module.parameters(), *module.buffers()]

    run.__name__ = f"layer_{name}"
    loop(run)


_layer("linear", lambda: nn.Linear(4, 3), 2, 4)
_layer("bilinear", lambda: nn.Bilinear(4, 4, 3), 2, 4, call=lambda module, x: module(x, x * 2))
_layer("conv1d", lambda: nn.Conv1d(3, 4, 3, padding=1), 2, 3, 8)
_layer("conv2d", lambda: nn.Conv2d(3, 4, 3, stride=2), 2, 3, 8, 8)
_layer("conv_transposed", lambda: nn.ConvTranspose2d(3, 4, 3), 2, 3, 4, 4)
_layer("depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4), 2, 4, 6, 6)
_layer("batch_norm", lambda: nn.BatchNorm2d(3), 4, 3, 5, 5)
_layer("group_norm", lambda: nn.GroupNorm(2, 4), 2, 4, 3, 3)
_layer("instance_norm", lambda: nn.InstanceNorm1d(4, affine=True), 2, 4, 6)
_layer("layer_norm", lambda: nn.LayerNorm(6), 3, 6)
_layer("rms_norm", lambda: nn.RMSNorm(6), 3, 6)
_layer("rnn", lambda: nn.RNN(4, 5), 3, 2, 4)
_layer("lstm", lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), 3, 2, 4)
_layer("gru", lambda: nn.GRU(4, 5, batch_first=True), 2, 3, 4)
_layer("lstm_cell", lambda: nn.LSTMCell(4, 5), 2, 4)
_layer("attention", lambda: nn.MultiheadAttention(8, 2), 3, 2, 8, call=lambda m, x: m(x, x, x))
_layer("encoder", lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 3, 2, 8)
_layer(
    "decoder",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    *(2, 3, 8),
    call=lambda module, x: module(x, x * 2),
)
_layer("pooled", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)), 2, 1, 8, 8)
_layer("adaptive", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2)), 2, 1, 8, 8)
_layer(
    "upsampled", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Upsample(scale_factor=2)), 2, 1, 5, 5
)
_layer("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), 2, 4)
_layer("prelu", lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()), 2, 4)


@loop
def embeddings_with_tied_weights() -> Sequence[Any]:
    table = filled(nn.Embedding(10, 6, padding_idx=0))
    head = nn.Linear(6, 10, bias=False)
    head.weight = table.weight
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(2):
        loss = F.cross_entropy(head(table(tokens)).flatten(0, 1), tokens.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss, table.weight]


@loop
def bags_of_embeddings() -> Sequence[Any]:
    bag = filled(nn.EmbeddingBag(10, 4, mode="mean"))
    out = bag(torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 3]))
    out.sum().backward()
    return [out, bag.weight.grad]


@loop
def language_model() -> Sequence[Any]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            parts = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm(x))))

    model = filled(nn.ModuleList([nn.Embedding(11, 8), Block(), Block(), nn.Linear(8, 11)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    tokens = torch.arange(24).reshape(3, 8) % 11
    losses = []
    for _ in range(4):
        x = tokens
        for layer in model:
            x = layer(x)
        loss = F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return [*losses, *model.parameters()]


@loop
def tokens_are_generated() -> Sequence[Any]:
    table, head = filled(nn.Embedding(7, 4)), filled(nn.Linear(4, 7))
    tokens = torch.tensor([[1]])
    with torch.no_grad():
        for _ in range(5):
            following = head(table(tokens[:, -1])).softmax(-1).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
            if following.item() == 6:
                break
    return [tokens]


# -- losses ---------------------------------------------------------------------------------------


@loop
def many_losses() -> Sequence[Any]:
    logits = made(4, 5).requires_grad_()
    classes = torch.tensor([0, 1, 2, 4])
    target = made(4, 5, seed=3)
    losses = [
        F.cross_entropy(logits, classes, label_smoothing=0.1, weight=made(5).abs()),
        F.nll_loss(logits.log_softmax(1), classes),
        F.binary_cross_entropy_with_logits(logits, target.sigmoid(), pos_weight=torch.tensor(2.0)),
        F.kl_div(logits.log_softmax(1), target.softmax(1), reduction="batchmean"),
        F.smooth_l1_loss(logits, target),
        F.huber_loss(logits, target, delta=0.5),
        F.cosine_embedding_loss(logits, target, torch.ones(4)),
        F.triplet_margin_loss(logits, target, target.flip(0)),
        F.multi_margin_loss(logits, classes),
        F.gaussian_nll_loss(logits, target, torch.ones(4, 5)),
        F.poisson_nll_loss(logits, target.abs()),
    ]
    torch.stack(losses).sum().backward()
    return [*losses, logits.grad]


# -- ways to compute gradients --------------------------------------------------------------------


@loop
def activations_are_computed_again() -> Sequence[Any]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = torch.utils.checkpoint.checkpoint(model[:2], made(6, 4), use_reentrant=False)
        F.mse_loss(model[2](hidden), made(6, 2)).backward()
        optimizer.step()
    return list(model.parameters())


@loop
def activations_are_computed_again_with_a_second_backward() -> Sequence[Any]:
    model = network()
    x = made(6, 4).requires_grad_()
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
    out.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@loop
def hooks_see_values() -> Sequence[Any]:
    model, seen = network(), []
    model[0].register_forward_hook(lambda _module, _given, out: seen.append(out.mean().item()))
    model[2].register_full_backward_hook(lambda _module, _given, out: seen.append(out[0].norm()))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().max()))
    F.mse_loss(model(made(6, 4)), made(6, 2)).backward()
    return [*seen, model[0].weight.grad]


@loop
def gradient_penalty() -> Sequence[Any]:
    model, x = network(), made(6, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
    return [
        gradient,
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


@loop
def inner_and_outer_steps() -> Sequence[Any]:
    weight = made(4, 2).requires_grad_()
    x, y = made(6, 4), made(6, 2, seed=2)
    (gradient,) = torch.autograd.grad(F.mse_loss(x @ weight, y), weight, create_graph=True)
    F.mse_loss(x @ (weight - 0.1 * gradient), y).backward()
    return [weight.grad]


@loop
def own_function_with_a_backward() -> Sequence[Any]:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return 2 * ctx.saved_tensors[0] * gradient

    x = made(4).requires_grad_()
    Square.apply(x).sum().backward()
    return [x.grad]


@loop
def functions_of_gradients() -> Sequence[Any]:
    x = made(4)

    def f(x: Any) -> Any:
        return (x.sin() * x).sum()

    return [torch.func.grad(f)(x), torch.func.jvp(f, (x,), (torch.ones(4),))[1]]


@loop
def functions_over_batches() -> Sequence[Any]:
    model, x, y = network(), made(6, 4), made(6, 2)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: Any, x: Any, y: Any) -> Any:
        out = torch.func.functional_call(model, weights, (x.unsqueeze(0),))
        return F.mse_loss(out, y.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    return list(each.values())


@loop
def jacobians() -> Sequence[Any]:
    x = made(3)
    return [
        torch.autograd.functional.jacobian(lambda x: x * x.sum(), x),
        torch.autograd.functional.hessian(lambda x: (x**3).sum(), x),
    ]


# -- kinds of training ----------------------------------------------------------------------------


@loop
def adapters_of_low_rank() -> Sequence[Any]:
    base = network().requires_grad_(False)
    down, up = filled(nn.Linear(4, 2, bias=False)), filled(nn.Linear(2, 8, bias=False))
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=0.01)
    x, y = made(6, 4), made(6, 2)
    for _ in range(3):
        loss = F.mse_loss(base[2](torch.tanh(base[0](x) + up(down(x)))), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss, *down.parameters(), *up.parameters()]


@loop
def policy_with_clipped_ratios() -> Sequence[Any]:
    model = filled(nn.ModuleDict({"policy": nn.Linear(4, 3), "value": nn.Linear(4, 1)}))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    states, actions = made(8, 4), torch.arange(8) % 3
    returns = made(8, seed=2)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=model["policy"](states)).log_prob(actions)
    for _ in range(3):
        policy = torch.distributions.Categorical(logits=model["policy"](states))
        value = model["value"](states).squeeze(-1)
        advantage = returns - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(actions) - old).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -clipped.mean() + F.mse_loss(value, returns) - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [loss, *model.parameters()]


@loop
def mixture_of_experts() -> Sequence[Any]:
    experts = nn.ModuleList([filled(nn.Linear(4, 4)) for _ in range(3)])
    router, x = filled(nn.Linear(4, 3)), made(6, 4)
    weights, chosen = router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, slot = torch.where(chosen == number)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
    out.square().sum().backward()
    return [out, router.weight.grad, *(expert.weight.grad for expert in experts)]


@loop
def autoencoder_with_a_distribution() -> Sequence[Any]:
    encoder, decoder = filled(nn.Linear(4, 4)), filled(nn.Linear(2, 4))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    x, noise = made(6, 4), made(6, 2, seed=9)
    for _ in range(3):
        mean, spread = encoder(x).chunk(2, -1)
        normal = torch.distributions.Normal(mean, F.softplus(spread))
        out = decoder(mean + normal.scale * noise)
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        loss = F.mse_loss(out, x) + 0.1 * torch.distributions.kl_divergence(normal, prior).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss, *encoder.parameters()]


@loop
def two_networks_against_each_other() -> Sequence[Any]:
    generator, critic = filled(nn.Linear(2, 4)), filled(nn.Linear(4, 1))
    first = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    real, noise = made(6, 4), made(6, 2, seed=4)
    for _ in range(3):
        second.zero_grad()
        fake = generator(noise)
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        first.step()
    return [loss, *generator.parameters(), *critic.parameters()]


@loop
def student_learns_from_a_teacher() -> Sequence[Any]:
    teacher, student = network().eval(), filled(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for _ in range(3):
        with torch.no_grad():
            wanted = (teacher(made(6, 4)) / 2).softmax(-1)
        loss = F.kl_div((student(made(6, 4)) / 2).log_softmax(-1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss, *student.parameters()]


@loop
def preferences() -> Sequence[Any]:
    policy, reference = filled(nn.Linear(4, 1)), filled(nn.Linear(4, 1)).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    better, worse = made(6, 4), made(6, 4, seed=3)
    for _ in range(3):
        margin = policy(better) - policy(worse) - reference(better) + reference(worse)
        loss = -F.logsigmoid(0.1 * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss, (margin > 0).float().mean().item()]


@loop
def weights_are_pruned() -> Sequence[Any]:
    from torch.nn.utils import prune

    layer = filled(nn.Linear(4, 3))
    prune.l1_unstructured(layer, "weight", amount=0.5)
    layer(made(2, 4)).sum().backward()
    prune.remove(layer, "weight")
    return [layer.weight]


@loop
def modules_are_saved_and_copied() -> Sequence[Any]:
    model = network()
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    model.requires_grad_(False).eval()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, other.parameters())
    return [vector, *other.parameters()]


# -- initial values and distributions -------------------------------------------------------------


@loop
def initial_values() -> Sequence[Any]:
    weight = torch.empty(4, 4)
    results = []
    for name in ("zeros_", "ones_", "eye_"):
        getattr(nn.init, name)(weight)
        results.append(weight.clone())
    nn.init.constant_(weight, 3.0)
    nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)
    results.append(weight.abs().max() <= 0.04)
    for name in ("xavier_uniform_", "kaiming_normal_", "orthogonal_", "normal_", "uniform_"):
        getattr(nn.init, name)(weight)
        results.append(torch.isfinite(weight).all())
    return results


@loop
def distributions() -> Sequence[Any]:
    d = torch.distributions
    normal = d.Normal(torch.zeros(3), torch.ones(3))
    many = [
        normal.log_prob(made(3)),
        normal.cdf(made(3)),
        d.kl_divergence(normal, d.Normal(made(3), made(3).abs() + 1)),
        d.Beta(torch.tensor(2.0), torch.tensor(3.0)).log_prob(torch.tensor(0.3)),
        d.Bernoulli(torch.tensor([0.2, 0.8])).entropy(),
        d.Categorical(torch.tensor([0.2, 0.3, 0.5])).log_prob(torch.tensor(1)),
        d.MultivariateNormal(torch.zeros(2), torch.eye(2)).log_prob(made(2)),
        d.Dirichlet(torch.ones(3)).log_prob(torch.tensor([0.2, 0.3, 0.5])),
        d.Independent(normal, 1).log_prob(made(3)),
    ]
    shapes = [
        d.Gamma(torch.ones(2), 1.0).sample((3,)),
        normal.rsample((4,)),
        d.Poisson(2.0).sample(),
    ]
    return [*many, *(list(sample.shape) for sample in shapes)]


# -- other parts of torch -------------------------------------------------------------------------


@loop
def products_of_many_indices() -> Sequence[Any]:
    a, b = made(2, 3, 4), made(2, 4, 5).requires_grad_()
    out = torch.einsum("bij,bjk->bik", a, b)
    out.square().sum().backward()
    return [out, b.grad, torch.tensordot(a, b.detach(), dims=([2], [1]))]


@loop
def fourier_and_complex_numbers() -> Sequence[Any]:
    x = made(8).requires_grad_()
    spectrum = torch.fft.rfft(x)
    torch.fft.irfft(spectrum * 0.5).square().sum().backward()
    z = torch.complex(made(3), made(3, seed=2))
    return [
        torch.fft.hfft(z),
        torch.fft.hfft(z.conj()),
        spectrum.abs(),
        x.grad,
        z.conj().imag,
        torch.view_as_real(z.conj().resolve_conj()),
        (z * z.conj()).real,
    ]


@loop
def linear_algebra() -> Sequence[Any]:
    a = made(4, 4) + 4 * torch.eye(4)
    a = (a @ a.T).requires_grad_()
    out = [
        torch.linalg.cholesky(a),
        torch.linalg.inv(a),
        torch.linalg.solve(a, made(4)),
        torch.linalg.det(a),
        torch.linalg.eigvalsh(a),
        torch.linalg.svdvals(a),
    ]
    torch.stack([part.sum() for part in out]).sum().backward()
    return [*out, a.grad]


@loop
def gathers_and_sorts() -> Sequence[Any]:
    x = made(4, 5).requires_grad_()
    values, order = x.sort(descending=True)
    out = [
        values,
        order,
        x.gather(1, order),
        x.cumsum(0),
        x.scatter(1, order[:, :2], 0.0),
        x.masked_fill(x > 0, -1.0),
        torch.where(x > 0, x, torch.zeros(())),
        x.quantile(0.5),
        x.roll(1, 0),
        x.unfold(1, 3, 1),
        torch.cdist(x, x.detach() + 1),
        torch.nn.functional.pad(x, (1, 1)),
    ]
    sum(part.sum() for part in out if part.requires_grad).backward()
    return [*out, x.grad]


@loop
def window_of_attention() -> Sequence[Any]:
    x = made(2, 2, 6, 4)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    score = (x @ x.transpose(-1, -2) / math.sqrt(4)).masked_fill(~mask, float("-inf"))
    return [score.softmax(-1) @ x, F.scaled_dot_product_attention(x, x, x, attn_mask=mask)]


@loop
def rotary_positions() -> Sequence[Any]:
    x = made(2, 6, 8)
    angles = torch.outer(torch.arange(6).float(), 1.0 / 100 ** (torch.arange(0, 4).float() / 4))
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_complex(x.reshape(2, 6, 4, 2)) * turns
    return [torch.view_as_real(turned).flatten(2)]
