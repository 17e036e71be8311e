"""The recipe of `stories`, all stages at small scale on a corpus that the test writes itself."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from recipes.stories import data as recipe_data  # noqa: E402
from recipes.stories import evaluate, probe  # noqa: E402
from recipes.stories.__main__ import app  # noqa: E402
from recipes.stories.export import export, load_model  # noqa: E402
from recipes.stories.model import ModelConfig, attend  # noqa: E402
from recipes.stories.train import TrainConfig, rate_factor, train  # noqa: E402

TINY = ModelConfig(vocab=512, layers=2, width=64, heads=4, kv_heads=2, mlp=128, context=128)
QUICK = TrainConfig(
    minutes=1e6, token_goal=50_000, tokens_per_step=512, tokens_per_pass=256, warmup_steps=5, compile=False,
    check_every=5, threads=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _a_small_standard_library() -> Iterator[None]:
    """One package of it: to parse all of it takes ten seconds each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_data, "STDLIB", recipe_data.STDLIB / "email")
        yield


def write_corpus(folder: Path) -> Path:
    """A few hundred made-up stories in the layout of the real corpus."""
    draw = random.Random(0)
    names, things, ends = ("Ann", "Ben", "Tom", "Mia"), ("dog", "ball", "tree", "boat"), ("smiled", "slept", "sang")

    def story() -> str:
        who, what = draw.choice(names), draw.choice(things)
        return f"Once there was a child called {who}. {who} had a {what}. One day {who} {draw.choice(ends)}." * 2

    files = {"stories/tinystories_a.txt": 300, "stories/others.txt": 60, "books/book.txt": 60}
    for name, count in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{i} {story()}\n<|endoftext|>\n" for i in range(count)))
    (folder / "factual").mkdir()
    (folder / "factual/fairytaleqa_qa.txt").write_text("A king had a cat.\n\nQuestion: Who?\nAnswer: The king.\n")
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with tokenizer and data, made by the commands themselves."""
    base = tmp_path_factory.mktemp("recipe")
    corpus, out = write_corpus(base / "corpus"), base / "out"
    for stage in (["tokenizer", "--size", "tiny"], ["data"]):
        run_stage(*stage, "--corpus", str(corpus), "--out", str(out))
    return out


def run_stage(*words: str) -> str:
    """Run a stage's command in this process: another one takes seconds to import torch."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def fork(prepared: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "data.safetensors"):
        (folder / name).write_bytes((prepared / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fork(prepared, tmp_path_factory.mktemp("trained") / "run")
    train(folder, TINY, replace(QUICK, max_steps=20))
    return folder


def test_the_loss_falls_on_training_and_held_out_text(trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [5, 10, 15, 20]
    assert log[-1]["train"] < log[0]["train"] - 0.5
    assert log[-1]["held"]["tiny"] < log[0]["held"]["tiny"] - 0.5


def test_a_resumed_run_ends_in_the_same_state_as_an_undisturbed_one(
    prepared: Path, trained: Path, tmp_path: Path
) -> None:
    folder = fork(prepared, tmp_path / "resumed")
    for steps in (9, 11):
        train(folder, TINY, replace(QUICK, max_steps=steps))
    for name in ("weights", "state"):
        whole, parts = (load_file(run / f"{name}.safetensors") for run in (trained, folder))
        assert whole.keys() == parts.keys()
        for key in whole.keys() - {"run"}:
            assert torch.equal(whole[key], parts[key]), f"{name}: {key}"
    assert load_file(trained / "state.safetensors")["run"][:2].tolist() == [20, 20 * 512]


def test_the_run_ends_at_the_token_goal_with_a_rate_of_zero(prepared: Path, tmp_path: Path) -> None:
    folder = fork(prepared, tmp_path / "goal")
    run = train(folder, TINY, replace(QUICK, token_goal=8 * 512))
    assert (run.step, run.progress(replace(QUICK, token_goal=8 * 512))) == (8, 1.0)
    assert rate_factor(1.0, 10**6, QUICK) == 0.0


def test_the_export_is_a_llama_with_the_same_logits(trained: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    target = tmp_path / "model"
    digest = export(trained, target, TINY)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {file.name for file in target.iterdir()}
    assert len(digest) == 64
    theirs = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = torch.randint(0, TINY.vocab, (2, TINY.context), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        difference = (theirs(ids).logits - load_model(trained, TINY)(ids)).abs().max().item()
    assert difference <= 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>Be kind.\n\nHi<|end|><|assistant|>"
    assert tokenizer("a<|end|>")["input_ids"][0] == 0
    assert tokenizer("a<|end|>")["input_ids"][-1] == 4


def test_the_stages_run_as_commands(prepared: Path, tmp_path: Path) -> None:
    folder = fork(prepared, tmp_path / "cli")
    common = ["--out", str(folder), "--size", "tiny"]
    said = run_stage("train", *common, "--steps", "3", "--no-compile", "--step-tokens", "512", "--threads", "1")
    assert "3 steps, 1,536 tokens" in said
    assert "sha256" in run_stage("export", *common, "--target", str(folder / "model"))
    words = ["sample", *common, "--prompt", "Once upon a time", "--tokens", "5"]
    command = [sys.executable, "-m", "recipes.stories", *words]  # the way of the README
    assert "[Once upon a time]" in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_opened_model_computes_what_the_trained_one_does(trained: Path) -> None:
    model = load_model(trained, TINY).requires_grad_(False)
    ids = torch.randint(0, TINY.vocab, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, shown = probe.run(model, ids)
    assert (whole - model(torch.tensor([ids]))[0]).abs().max() < 1e-4
    cache = probe.Cache()
    stepped = torch.cat([probe.run(model, part, cache)[0] for part in (ids[:20], ids[20:21], ids[21:])])
    assert (whole - stepped).abs().max() < 1e-4
    assert torch.allclose(torch.stack(shown).sum(-1), torch.ones(TINY.layers, TINY.heads, 60))
    kl = {window: probe.divergence(model, ids, 20, probe.View(window=window, sinks=4)) for window in (8, 56)}
    assert kl[8] > kl[56]
    assert abs(kl[56]) < 1e-6
    lost = [probe.divergence(model, ids, 20, probe.View(bits=bits, group=16)) for bits in (3, 8)]
    assert lost[0] > lost[1] > -1e-6  # 8 bits lose less than fp32 rounds


def test_the_losses_and_heads_are_measured(trained: Path) -> None:
    model = load_model(trained, TINY).requires_grad_(False)
    held = evaluate.losses(model, recipe_data.load_corpus(trained / "data.safetensors", "held"), 1000)
    assert 0 < held["tiny"]["per byte"] < held["tiny"]["per token"]
    assert len(evaluate.heads(model, length=20, trials=1)) == TINY.layers * TINY.heads


def test_a_copy_is_found_and_a_new_text_is_not(trained: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    corpus = "A dog ran home. " * 40
    assert evaluate.copied("A dog  ran\nhome. " * 30, corpus, tokenizer)
    assert not evaluate.copied("A cat ran home. " * 30, corpus, tokenizer)


def test_attention_in_blocks_is_causal_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 50, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (attend(q, k, v, block=16) - expected).abs().max() < 1e-5


def test_rows_give_every_source_its_share_and_documents_their_ends(prepared: Path) -> None:
    packer = recipe_data.Packer(recipe_data.load_corpus(prepared / "data.safetensors", "train"), TINY.vocab, seed=0)
    packer.aim(recipe_data.EARLY)
    ids, targets = packer.rows(400, 128)
    assert (ids[:, 0] == 0).all()
    assert ((ids == 0).sum() - (ids == 1).sum()) >= 0
    taken = {name: cursor.taken / ids.size for name, cursor in packer.cursors.items()}
    for name, share in recipe_data.EARLY.items():
        assert abs(taken[name] - share) < 0.02, name
    assert 0 < (targets == -100).mean() < 0.05


def test_held_out_documents_are_in_no_training_text(tmp_path: Path) -> None:
    sources = recipe_data.read_sources(write_corpus(tmp_path))
    for source in sources:
        assert not set(source.train) & set(source.held)
    assert any(source.held for source in sources)
    assert not any(source.held for source in sources if source.name in recipe_data.OWN)
