"""What a model computes inside, as arrays: equal to transformers' hidden states and attention."""

import numpy as np
import pytest
import torch

from tests.models.fixtures import make_checkpoint
from tokenwright import LLM, RequestError

PROMPT = [5, 6, 7, 8, 9, 10]
HEADS = [(0, 1), (2, 3), (1, 0)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("observe") / "model", "llama2")


def test_hidden_states_and_attention_are_the_oracles(made) -> None:
    with LLM(made.path, pages=64, dtype="float32") as llm:
        [done] = llm.generate([PROMPT], max_tokens=4, temperature=0.0, ignore_eos=True, observe=HEADS)
        seen = done.observed
        assert seen.tokens == (*PROMPT, *done.token_ids)
        right = made.model(torch.tensor([seen.tokens]), output_hidden_states=True, output_attentions=True)
        layers = llm.config.layers
        assert seen.hidden.shape == (layers + 1, 10, llm.config.width)
        for layer in range(layers):  # the last of transformers' is behind the final norm
            assert np.abs(seen.hidden[layer] - right.hidden_states[layer][0].detach().numpy()).max() <= 1e-4
        for layer, head in HEADS:
            found = seen.attention[layer, head]
            assert np.abs(found - right.attentions[layer][0, head].detach().numpy()).max() <= 1e-4
            assert np.abs(np.triu(found, 1)).max() == 0.0
        logits = right.logits[0].detach()
        assert np.abs(seen.lens(7)[-1] - torch.log_softmax(logits[7].double(), -1).numpy()).max() <= 1e-3
        assert int(seen.lens(len(PROMPT) - 1)[-1].argmax()) == done.token_ids[0]


def test_each_text_is_observed_and_none_without_being_asked(made) -> None:
    with LLM(made.path, pages=64) as llm:
        done = llm.generate(["the", "of and"], n=2, max_tokens=3, seed=1, observe=True)
        texts = [one for each in done for one in each.choices]
        assert [len(one.observed.tokens) - len(one.token_ids) for one in texts] == [
            len(llm.tokenizer.encode(prompt)) for prompt in ("the", "the", "of and", "of and")
        ]
        assert texts[0].observed.attention == {}
        assert llm.generate("the", max_tokens=1)[0].observed is None


@pytest.mark.parametrize(
    ("observe", "told"),
    [
        (3, "observe must be True, or a list"),
        ("all", "observe must be True, or a list"),
        ([(0, 99)], "heads from 0 to 3"),
        ([(-1, 0)], "layers are from 0 to 2"),
        ([0], "is no .layer, head."),
    ],
)
def test_what_cannot_be_observed(made, observe, told) -> None:
    with LLM(made.path, pages=64) as llm, pytest.raises(RequestError, match=told):
        llm.generate("the", max_tokens=1, observe=observe)


def test_threads_are_an_option(made) -> None:
    with LLM(made.path, pages=64, threads=1) as one, LLM(made.path, pages=64) as other:
        [right], [same] = (model.generate("the", max_tokens=4, seed=1) for model in (one, other))
        assert right.token_ids == same.token_ids
        assert (one.llm_engine.threads, other.llm_engine.threads) == (1, other.llm_engine.threads)
        assert other.llm_engine.threads >= 1
    with pytest.raises(RequestError, match="threads must be a whole number from 0"):
        LLM(made.path, threads=-1)
