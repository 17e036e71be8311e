"""The training run: one loop over steps, a schedule that ends with the time limit, and checkpoints to resume from.

`progress` goes from 0 to 1 and determines the learning rate, the length of the rows and the mix of sources. It is the
larger of tokens seen / token goal and minutes trained / minutes allowed, so on a machine of unknown or shared speed the
run still ends with a complete cool-down. Minutes trained are summed over resumes, without the pauses.

A checkpoint is two safetensors files (weights; optimiser and cursors) and is replaced atomically, so the last one is
always complete.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.stories.data import Corpus, Packer, load_corpus, shares
from recipes.stories.model import Model, ModelConfig, loss_of

LONG_ROWS = 0.6  # progress from which rows have the full context; before it, half
COOL_DOWN = 0.6  # progress from which the learning rate falls to 0


@dataclass(frozen=True)
class TrainConfig:
    minutes: float = 95.0
    token_goal: int = 60_000_000
    tokens_per_step: int = 8192
    tokens_per_pass: int = 2048  # a step's gradient is summed over passes of this size
    warmup_steps: int = 100
    muon_rate: float = 0.02  # for the matrices of the layers
    adam_rate: float = 0.003  # for the embedding and the norms
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1
    threads: int = 2
    compile: bool = True
    max_steps: int = 0  # stop with a checkpoint after this many steps of this call; 0: no limit
    check_every: int = 250  # steps between held-out losses
    save_minutes: float = 3.0


@dataclass
class Run:
    """The state of the run: everything besides weights and optimiser that a resume needs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def progress(self, config: TrainConfig) -> float:
        return min(1.0, max(self.tokens / config.token_goal, self.seconds / (60 * config.minutes)))


def rate_factor(progress: float, step: int, config: TrainConfig) -> float:
    """The learning rate's factor, a trapezoid: linear warm-up, constant, then linear to 0 at the end."""
    return min(1.0, (step + 1) / config.warmup_steps, (1.0 - progress) / (1.0 - COOL_DOWN))


def row_length(progress: float, context: int) -> int:
    return context if progress >= LONG_ROWS else context // 2


def make_optimisers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    hidden = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim == 1 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=config.muon_rate, weight_decay=config.weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=config.adam_rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]


class Trainer:
    """Model, optimisers, packer and state of one run in a folder."""

    def __init__(self, folder: Path, model_config: ModelConfig, config: TrainConfig) -> None:
        torch.set_num_threads(config.threads)
        self.folder, self.config = folder, config
        self.model = Model(model_config)
        self.model.reset(config.seed)
        self.optimisers = make_optimisers(self.model, config)
        self.base_rates = [group["lr"] for optimiser in self.optimisers for group in optimiser.param_groups]
        self.packer = Packer(load_corpus(folder / "data.safetensors", "train"), model_config.vocab, config.seed)
        self.held = load_corpus(folder / "data.safetensors", "held")
        self.run = Run()
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.compute_loss
        if config.compile:
            self.loss = torch.compile(self.compute_loss, dynamic=False)

    def compute_loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(self.model, ids, targets)

    def step(self) -> float:
        """One update. Returns the mean training loss of its tokens."""
        config, progress = self.config, self.run.progress(self.config)
        length = row_length(progress, self.model.config.context)
        self.packer.aim(shares(progress))
        rows = [torch.from_numpy(a) for a in self.packer.rows(config.tokens_per_step // length, length)]
        learned = int((rows[1] != -100).sum())
        size = max(1, config.tokens_per_pass // length)
        total = 0.0
        for ids, targets in zip(*(torch.split(part, size) for part in rows), strict=True):
            loss = self.loss(ids, targets) / learned
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.update(rate_factor(progress, self.run.step, config))
        self.run.step += 1
        self.run.tokens += rows[0].numel()
        return total

    def update(self, factor: float) -> None:
        groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]
        for group, rate in zip(groups, self.base_rates, strict=True):
            group["lr"] = rate * factor
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def held_losses(self) -> dict[str, float]:
        """Nats per token on a fixed part of the held-out documents, by source."""
        return {name: mean_loss(self.model, self.held, name)[0] for name in self.held.ids}

    def save(self) -> None:
        weights = {name: weight.detach().contiguous() for name, weight in self.model.named_parameters()}
        state = {"cursors": torch.from_numpy(self.packer.state())}
        state["run"] = torch.tensor([self.run.step, self.run.tokens, self.run.seconds], dtype=torch.float64)
        for number, optimiser in enumerate(self.optimisers):
            for index, values in optimiser.state_dict()["state"].items():
                state |= {f"optimiser.{number}.{index}.{key}": value for key, value in values.items()}
        for name, tensors in (("weights", weights), ("state", state)):
            save_file(tensors, self.folder / f"{name}.new", metadata={"step": str(self.run.step)})
        for name in ("weights", "state"):
            (self.folder / f"{name}.new").replace(self.folder / f"{name}.safetensors")

    def resume(self) -> bool:
        """Continue from the folder's checkpoint. False if there is none."""
        if not (self.folder / "state.safetensors").exists():
            return False
        self.model.load_state_dict(load_file(self.folder / "weights.safetensors"), strict=True)
        state = load_file(self.folder / "state.safetensors")
        step, tokens, seconds = state.pop("run").tolist()
        self.run = Run(int(step), int(tokens), seconds)
        self.packer.restore(state.pop("cursors").numpy(), shares(self.run.progress(self.config)))
        for number, optimiser in enumerate(self.optimisers):
            entries: dict[int, dict[str, Tensor]] = {}
            for key, value in state.items():
                _, owner, index, name = key.split(".")
                if int(owner) == number:
                    entries.setdefault(int(index), {})[name] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": entries})
        return True


def held_rows(corpus: Corpus, source: str, length: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The concatenated documents of a source in at most `most` disjoint rows: inputs and targets."""
    ids = torch.from_numpy(corpus.ids[source].astype("int64"))
    for start in range(0, min(len(ids) - 1, most * length), length):
        row = ids[start : start + length + 1]
        yield row[None, :-1], row[None, 1:]


@torch.inference_mode()
def mean_loss(model: Model, corpus: Corpus, source: str, most: int = 32) -> tuple[float, int]:
    """Nats per token over at most `most` rows, and the number of tokens."""
    total, count = 0.0, 0
    with torch.autocast("cpu", torch.bfloat16):
        for ids, targets in held_rows(corpus, source, min(512, model.config.context), most):
            total += loss_of(model, ids, targets).item()
            count += targets.numel()
    return total / count, count


def train(folder: Path, model_config: ModelConfig, config: TrainConfig) -> Run:
    """Train to the end (or `max_steps`), resuming the folder's checkpoint, and append to its `log.jsonl`."""
    trainer = Trainer(folder, model_config, config)
    resumed = trainer.resume()
    print(f"{'resumed at' if resumed else 'new run,'} step {trainer.run.step}", flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (folder / "log.jsonl").open("a") as log, Progress(*columns) as bar:
        task = bar.add_task("training", total=1.0)
        saved, first, losses = time.monotonic(), trainer.run.step, []
        while (progress := trainer.run.progress(config)) < 1.0:
            began = time.monotonic()
            losses.append(trainer.step())
            run = trainer.run
            if run.step % config.check_every == 0:
                entry = report(trainer, losses, progress)
                print(json.dumps(entry), file=log, flush=True)
                losses = []
                bar.console.print(json.dumps(entry), soft_wrap=True)
            run.seconds += time.monotonic() - began
            shown = f"step {run.step}" + (f"  loss {losses[-1]:.3f}" if losses else "")
            bar.update(task, completed=progress, description=shown)
            if time.monotonic() - saved > 60 * config.save_minutes:
                trainer.save()
                saved = time.monotonic()
            if config.max_steps and run.step - first >= config.max_steps:
                break
        trainer.save()
    return trainer.run


def report(trainer: Trainer, losses: list[float], progress: float) -> dict[str, object]:
    run = trainer.run
    return {
        "step": run.step, "tokens": run.tokens, "seconds": round(run.seconds, 1), "progress": round(progress, 4),
        "train": round(sum(losses) / len(losses), 4),
        "held": {name: round(loss, 4) for name, loss in trainer.held_losses().items()},
    }  # fmt: skip
