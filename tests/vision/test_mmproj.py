"""A tower in a GGUF file beside its model: the bits of the folder that both were made from."""

import shutil
from pathlib import Path

import pytest

from tests.vision.mmproj import FILES, write_pair, write_tower
from tests.vision.models import make_model, picture, question
from tests.vision.test_logits import scored
from tokenwright import LLM, CheckpointError, RequestError, plan
from tokenwright.units import binary


@pytest.mark.parametrize("kind", list(FILES))
def test_the_files_have_the_bits_of_the_folder(kind: str, tmp_path: Path) -> None:
    make_model(tmp_path / "folder", kind)
    if kind == "lfm2_vl":  # whose files have no sizes: they are the published models'
        (tmp_path / "folder" / "preprocessor_config.json").write_text('{"resample": 2}')
    file = write_pair(tmp_path / "folder", tmp_path / "files", kind)
    if kind == "gemma3":  # llama.cpp scales its embeddings as the published bfloat16 model does
        config = tmp_path / "folder" / "config.json"
        config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    talk = question("See ", picture(50, 70, 1), " and then this one: ", picture(90, 40, 2), "what?")
    with LLM(tmp_path / "folder", dtype="float32") as llm:
        expected = scored(llm, talk)
    with LLM(file, dtype="float32") as llm:
        found = scored(llm, talk)
        held = sum(4 * one.size for one in llm.llm_engine.loaded.vision.checkpoint.tensors("float32").values())
    assert any(f"a tower of {binary(held)}" in remark for remark in plan(file).remarks), plan(file).remarks
    off = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    near = ("qwen3_5", "lfm2_vl")  # whose files hold exp(A_log), and patches colour by colour
    assert off <= (1e-5 if kind in near else 0)
    if kind in ("llava", "gemma3"):
        tower = tmp_path / "another" / "swapped.gguf"
        tower.parent.mkdir()
        write_tower(tmp_path / "folder", tower, kind, swapped=True)
        with LLM(file, dtype="float32", mmproj=tower) as llm:
            assert scored(llm, talk) == found


def test_the_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    make_model(tmp_path / "folder", "gemma3")
    file = write_pair(tmp_path / "folder", tmp_path / "files", "gemma3")
    tower = next(file.parent.glob("mmproj*"))
    talk = question(picture(32, 32), "what?")

    def refusal() -> str:
        with LLM(file) as llm, pytest.raises(RequestError) as refused:
            llm.chat(talk, max_tokens=1)
        return str(refused.value)

    shutil.copy(tower, tower.with_name("mmproj-model-BF16.gguf"))  # another format of the same
    with LLM(file) as llm:
        assert llm.chat(talk, max_tokens=1).usage.prompt_tokens > 16
    shutil.copy(tower, tower.with_name("mmproj-other.gguf"))
    assert "several towers" in refusal()
    for one in file.parent.glob("mmproj*"):
        one.unlink()
    assert "no mmproj file" in refusal()
    for named, told in ((file, "is a model, and no tower"), (tower, "missing")):
        with pytest.raises(CheckpointError, match=told):
            LLM(file, mmproj=named)
    make_model(tmp_path / "other", "smolvlm")
    write_tower(tmp_path / "other", tower, "smolvlm")
    assert "lacks the token <image>" in refusal()
