"""GGUF files that we write: read again, by us and by the `gguf` package, they are the model; others are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch

from tests.checkpoints.gguf.test_gguf import CHANGES
from tests.models.files.adapters import write_adapter
from tests.models.fixtures import make_checkpoint, write_json
from tests.tensors import tensors_of, unpacked
from tokenwright import LLM
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.gguf_writer import check_writing, write_gguf
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.text import Tokenizer
from tokenwright.text.files import TokenizerFiles
from tokenwright.text.metadata import WHOLE, read_metadata
from tokenwright.text.to_metadata import tokenizer_metadata

NATIVE = WeightFormat("native")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
KINDS = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def written(model: Path, file: Path, form: str) -> Checkpoint:
    write_gguf(check_writing(Checkpoint.open(model), file, WeightFormat.parse(form)), file)
    return Checkpoint.open(file)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("kind", ["llama2", "llama3", "yarn", "linear", "qwen2.5", "qwen3"])
def test_what_is_written_is_the_model(kind: str, form: str, tmp_path: Path) -> None:
    """The weights in memory are those of --weights on the folder, to the bit."""
    model = make_checkpoint(tmp_path / "model", kind, changes=CHANGES.get(kind), dtype="bfloat16").path
    theirs, ours = Checkpoint.open(model), written(model, tmp_path / "out.gguf", form)
    assert ours.graph == theirs.graph
    assert ours.generation.eos_ids == theirs.generation.eos_ids
    groups = "" if form == "bfloat16" else ":32"
    expected = unpacked(theirs.graph, load_packed(theirs, WeightFormat.parse(form + groups), "bfloat16"))
    found = unpacked(ours.graph, load_packed(ours, NATIVE, "bfloat16"))
    same = {name for name, one in expected.items() if torch.equal(found[name], one)}
    assert expected.keys() - same <= ({"embed.weight", "head.weight"} if form == "int4" else set())
    assert KINDS[form] in {one.dtype for one in ours.stored.values()}


@pytest.mark.parametrize(("kind", "form"), [("llama2", "int8"), ("qwen3", "bfloat16")])
def test_logits_and_texts_are_those_of_the_folder(kind: str, form: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", kind, dtype="bfloat16").path
    file = written(model, tmp_path / "out.gguf", form).path
    text = "the model said hello 12"
    with LLM(model, weights="int8:32" if form == "int8" else form) as theirs, LLM(file) as ours:
        ids = theirs.tokenizer.encode(text)
        assert ours.tokenizer.encode(text) == ids
        assert numpy.array_equal(ours.score(ids), theirs.score(ids))
        conversation: Any = [{"role": "user", "content": "hello"}]
        assert ours.render(conversation) == theirs.render(conversation)


def test_the_gguf_package_reads_the_same_numbers(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama2").path
    ours = written(model, tmp_path / "out.gguf", "int4")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = tensors_of(ours, torch.float32)
    assert {one.name for one in reader.tensors} == {source.name for source in ours.sources.values()}
    by_name = {one.name: one for one in reader.tensors}
    for name in ("embed.weight", "layers.1.mlp.down.weight", "norm.weight"):
        one = by_name[ours.sources[name].name]
        numbers = gguf.quants.dequantize(one.data, one.tensor_type)
        assert numpy.array_equal(numbers, tensors[name].numpy())
    assert reader.fields["general.architecture"].contents() == "llama"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("small-0.6B", "small-0.6B"),
        ("small-0.6B.gguf", "small-0.6B"),
        ("models--maker--small-0.6B/snapshots/5f1c", "small-0.6B"),
    ],
)
def test_the_name_in_a_file_is_the_model_s(place: str, name: str, tmp_path: Path) -> None:
    """Of a folder the whole name, though it ends in what looks like a suffix; of the hub's cache the repository's."""
    folder = tmp_path / "model" if place.endswith(".gguf") else tmp_path / place
    model = make_checkpoint(folder, "llama2").path
    if place.endswith(".gguf"):
        model = written(model, tmp_path / place, "bfloat16").path
    file = written(model, tmp_path / "out.gguf", "bfloat16").path
    assert gguf.GGUFReader(file).fields["general.name"].contents() == name


def test_a_gguf_file_may_be_written_from_another(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama2", dtype="bfloat16").path
    first = written(model, tmp_path / "first.gguf", "bfloat16")
    second = written(first.path, tmp_path / "second.gguf", "bfloat16")
    tensors = tensors_of(second)
    assert all(torch.equal(tensors[name], one) for name, one in tensors_of(Checkpoint.open(model)).items())


def pieces_files(prefix: bool) -> TokenizerFiles:
    """A small tokenizer of SentencePiece's kind, in the order of merges that scores make."""
    from tokenwright.text.bpe import sentencepiece, with_added

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{at:02X}>" for at in range(256)), "▁", "t", "h", "e", "▁t", "he", "▁the"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 263 + [-1.0, -2.0, -3.0]
    library = with_added(sentencepiece(tokens, scores, kinds, 0, prefix=prefix), tokens, kinds)
    return TokenizerFiles(library, "<s>", ("</s>",), True, "{{ messages }}")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_are_written(prefix: bool) -> None:
    files = pieces_files(prefix)
    metadata, nearest = tokenizer_metadata(files, (2,), 270)
    assert nearest is None and WHOLE not in metadata
    assert metadata["tokenizer.ggml.model"] == "llama" and len(metadata["tokenizer.ggml.tokens"]) == 270
    back = Tokenizer(read_metadata(metadata, "here"), 270)
    for text in ("the the  theh", "élan\n", "<s>the</s> t", ""):
        assert back.encode(text) == Tokenizer(files, 270).encode(text)
    assert back.chat_template == "{{ messages }}" and back.eos_ids == (2,)


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    def refusal(model: Path | str, form: str = "int8", file: Path = tmp_path / "out.gguf") -> str:
        with pytest.raises((CheckpointError, RequestError)) as caught:
            check_writing(Checkpoint.open(model), file, WeightFormat.parse(form))
        return str(caught.value)

    model = make_checkpoint(tmp_path / "model", "llama2").path
    assert "GPT2LMHeadModel cannot be written" in refusal(make_checkpoint(tmp_path / "gpt2", "gpt2").path)
    assert "not float16" in refusal(model, "float16")
    assert "exists already" in refusal(model, file=model / "config.json")
    narrow = make_checkpoint(tmp_path / "narrow", "llama2", changes={"intermediate_size": 88}).path
    assert "88 inputs, which are no blocks of 32" in refusal(narrow)
    assert check_writing(Checkpoint.open(narrow), tmp_path / "out.gguf", WeightFormat("bfloat16"))
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    odd = make_checkpoint(tmp_path / "dynamic", "llama2", changes=dynamic).path
    assert "DynamicScaling" in refusal(odd)
    state = json.loads((model / "tokenizer.json").read_text())
    state["added_tokens"][0]["lstrip"] = True
    write_json(model / "tokenizer.json", state)
    assert "takes spaces beside it" in refusal(model)
    state["added_tokens"][0]["lstrip"] = False
    single = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [single, BYTES]}
    write_json(model / "tokenizer.json", state)
    assert "splits text in a way that has no name among" in (said := refusal(model)) and "nor nearly" in said


def test_a_tokenizer_without_a_name_is_written_whole(tmp_path: Path) -> None:
    """The model inside: single digits, without the space before them. No token has two, so gpt-2 gives the same ids."""
    contents = check_writing(Checkpoint.open("stories"), tmp_path / "out.gguf", WeightFormat.parse("int8"))
    write_gguf(contents, tmp_path / "out.gguf")
    assert contents.metadata["tokenizer.ggml.pre"] == "gpt-2" and not contents.remarks
    with LLM("stories", weights="int8:32") as theirs, LLM(tmp_path / "out.gguf") as ours:
        for text in ("Once upon a time 12  34\n\n5", "<|user|>it's\t7"):
            ids = theirs.tokenizer.encode(text)
            assert ours.tokenizer.encode(text) == ids
            assert numpy.array_equal(ours.score(ids), theirs.score(ids))
        assert (ours.tokenizer.bos_id, ours.eos_ids) == (theirs.tokenizer.bos_id, theirs.eos_ids)
        assert ours.generation.sampling == theirs.generation.sampling == {"temperature": 0.7, "top_p": 0.95}
    metadata = dict(contents.metadata)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"][300] = "another"
    with pytest.raises(CheckpointError, match="token 300 is 'another', but "):
        read_metadata(metadata, "here")


def test_what_a_file_cannot_say_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenwright.text.to_metadata._MOST_OTHERS", 0.6)  # of a small vocabulary's few texts
    model = make_checkpoint(tmp_path / "model", "llama2", dtype="bfloat16").path
    state = json.loads((model / "tokenizer.json").read_text())
    words = {"type": "Split", "pattern": {"Regex": "r|[^r]+"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [words, BYTES]}
    write_json(model / "tokenizer.json", state)
    suggested = {"typical_p": 0.9, "suppress_tokens": [7], "min_new_tokens": 2, "top_k": 20, "num_beams": 4}
    write_json(model / "generation_config.json", suggested)
    contents = check_writing(Checkpoint.open(model), tmp_path / "out.gguf", WeightFormat("bfloat16"))
    assert "cannot hold typical_p, banned_ids, min_tokens, num_beams, which" in contents.remarks[0]
    assert "it says gpt-2, with other ids for such texts as " in contents.remarks[1]
    assert contents.metadata["general.sampling.top_k"] == 20


def test_adapters_are_merged_as_they_are_written(tmp_path: Path) -> None:
    """Rows of q and k lie in pairs in the file, and in order in an adapter; a file may be the source as well."""
    model = make_checkpoint(tmp_path / "model", "llama2", dtype="bfloat16").path
    adapter = write_adapter(str(model), tmp_path / "adapter", 4, 1)
    expected = tensors_of(Checkpoint.open(model).merged([adapter]), torch.bfloat16)
    plain = written(model, tmp_path / "plain.gguf", "bfloat16").path
    for source in (model, plain):
        contents = check_writing(
            Checkpoint.open(source).merged([adapter]), tmp_path / f"{source.name}.gguf", WeightFormat("bfloat16")
        )
        write_gguf(contents, tmp_path / f"{source.name}.gguf")
        found = tensors_of(Checkpoint.open(tmp_path / f"{source.name}.gguf"))
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_values_that_are_not_finite_leave_no_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_checkpoint(tmp_path / "model", "llama2").path
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight .* not finite"):
        written(model, tmp_path / "out" / "out.gguf", "int8")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_writer_leaves_no_draft_for_long(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama2").path
    (tmp_path / "out").mkdir()
    script = (
        "import os, signal, sys; from pathlib import Path; from tokenwright.formats import WeightFormat;"
        "from tokenwright.checkpoints.folder import Checkpoint;"
        "from tokenwright.checkpoints.packing.gguf_writer import *;"
        "contents = check_writing(Checkpoint.open(sys.argv[1]), Path(sys.argv[2]), WeightFormat('bfloat16'));"
        "write_gguf(contents, Path(sys.argv[2]), lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    file = tmp_path / "out" / "out.gguf"
    ended = subprocess.run([sys.executable, "-c", script, model, file], check=False, timeout=300)
    assert ended.returncode == -9 and not file.exists()
    assert [one.name.startswith(".out.gguf.draft") for one in file.parent.iterdir()] == [True]
    written(model, file, "int8")
    assert list(file.parent.iterdir()) == [file]
