"""Train the model `stories`, one command per stage, in this order: tokenizer, data, train, curve, export, sample,
evaluate. Run from the repository's root. The stages share their files in one folder (`--out`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from recipes.stories import data as recipe_data
from recipes.stories.evaluate import evaluate as evaluate_model
from recipes.stories.export import export as export_folder
from recipes.stories.export import load_model
from recipes.stories.model import ModelConfig
from recipes.stories.sample import PROMPTS, QUESTIONS, Drawing, continue_text
from recipes.stories.train import TrainConfig
from recipes.stories.train import train as run_training

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Out = Annotated[Path, typer.Option(help="Folder of the run: tokenizer, data, checkpoints, log.")]
CorpusDir = Annotated[Path, typer.Option(help="Folder with stories/, books/ and factual/ (see the README).")]
Size = Annotated[str, typer.Option(help="Model: 'full' as shipped, 'tiny' to try the recipe.")]

SIZES = {
    "full": ModelConfig(),
    "tiny": ModelConfig(vocab=512, layers=2, width=64, heads=4, kv_heads=2, mlp=128, context=128),
}
BUILD, CORPUS = Path("build/stories"), Path("../shared/corpus")


def model_config(size: str) -> ModelConfig:
    if size not in SIZES:
        raise typer.BadParameter(f"no size {size!r}; there are {', '.join(SIZES)}")
    return SIZES[size]


@app.command()
def tokenizer(corpus: CorpusDir = CORPUS, out: Out = BUILD, size: Size = "full") -> None:
    """Train the byte-level BPE on the training documents."""
    out.mkdir(parents=True, exist_ok=True)
    trained = recipe_data.train_tokenizer(recipe_data.read_sources(corpus), model_config(size).vocab)
    trained.save(str(out / "tokenizer.json"))
    print(f"{trained.get_vocab_size()} pieces in {out / 'tokenizer.json'}")


@app.command()
def data(corpus: CorpusDir = CORPUS, out: Out = BUILD) -> None:
    """Encode all documents, training and held-out, into one file."""
    sources = recipe_data.read_sources(corpus)
    arrays = recipe_data.encode_sources(sources, Tokenizer.from_file(str(out / "tokenizer.json")))
    recipe_data.save_corpus(arrays, out / "data.safetensors")
    for source in sources:
        counts = [arrays[f"{source.name}.{part}.ids"].size for part in ("train", "held")]
        print(f"{source.name:10} {len(source.train):5} documents {counts[0]:9,} ids   "
              f"held out {len(source.held):3} documents {counts[1]:7,} ids")  # fmt: skip


@app.command()
def train(
    out: Out = BUILD, size: Size = "full",
    minutes: Annotated[float, typer.Option(help="Time of the whole run, resumes included, pauses not.")] = 97.0,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    steps: Annotated[int, typer.Option(help="Pause, with a checkpoint, after so many steps; 0: never.")] = 0,
    token_goal: Annotated[int, typer.Option(help="Tokens after which the run is over in any case.")] = 60_000_000,
    step_tokens: Annotated[int, typer.Option(help="Tokens of one update.")] = 8192,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Needs a C++ compiler.")] = True,
) -> None:  # fmt: skip
    """Train, or continue training, until the time or the token goal is reached."""
    settings = replace(
        TrainConfig(), minutes=minutes, threads=threads, max_steps=steps, compile=compiled, token_goal=token_goal,
        tokens_per_step=step_tokens, tokens_per_pass=min(2048, step_tokens), check_every=min(250, steps or 250),
    )  # fmt: skip
    run = run_training(out, model_config(size), settings)
    print(f"{run.step} steps, {run.tokens:,} tokens, {run.seconds / 60:.1f} minutes")


@app.command()
def export(
    out: Out = BUILD, size: Size = "full",
    target: Annotated[Path, typer.Option(help="Where the model goes.")] = BUILD / "model",
) -> None:  # fmt: skip
    """Write the checkpoint as a Hugging Face Llama folder in bf16."""
    print(f"{target}: model.safetensors sha256 {export_folder(out, target, model_config(size))}")


@app.command()
def sample(
    out: Out = BUILD, size: Size = "full",
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; several are allowed.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    count: Annotated[int, typer.Option(help="Samples of each prompt.")] = 1,
    tokens: Annotated[int, typer.Option(help="Most tokens of a sample.")] = 60,
) -> None:  # fmt: skip
    """Continue a few prompts."""
    model = load_model(out, model_config(size))
    pieces = Tokenizer.from_file(str(out / "tokenizer.json"))
    drawing = Drawing(temperature=temperature, most=tokens)
    for text in prompt or (*PROMPTS, *QUESTIONS):
        for seed in range(count):
            print(f"[{text}]{continue_text(model, pieces, text, drawing, seed)}\n")


@app.command()
def curve(
    out: Out = BUILD,
    target: Annotated[Path, typer.Option(help="The picture: .svg or .png.")] = BUILD / "loss.svg",
) -> None:
    """Draw the losses of the run's log (needs matplotlib)."""
    from recipes.stories.curve import draw as draw_curve

    draw_curve(out / "log.jsonl", target)
    print(target)


@app.command()
def evaluate(corpus: CorpusDir = CORPUS, out: Out = BUILD, size: Size = "full") -> None:
    """Held-out losses, heads, copying, and the figures of the explorer's challenges."""
    print(json.dumps(evaluate_model(out, corpus, model_config(size)), indent=1))


if __name__ == "__main__":
    app()
