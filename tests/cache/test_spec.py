"""What each layer keeps: its parts, groups and bytes; what is refused; how memory is shared out among groups."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.fixtures import KINDS, make_config
from tokenwright.cache import Heads, LayerSpec, Part, group_layers, groups_for, layer_specs, pages_within
from tokenwright.cache.codec import CODECS
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.config import Latent, ModelConfig
from tokenwright.engine.layer_group import AttentionWindow, Group
from tokenwright.errors import RequestError
from tokenwright.formats import KVFormat

F32, INT8, INT4, FP8 = (CODECS[name] for name in ("float32", "int8", "int4", "fp8"))


def config_of(kind: str) -> ModelConfig:
    return parse_config(make_config(kind)).config


def specs_of(kind: str, kv: str = "native", **window: Any) -> tuple[LayerSpec, ...]:
    return layer_specs(parse_config(make_config(kind)).graph, "float32", KVFormat.parse(kv), **window)


FOREIGN = {
    "q8_0": "int8", "q4_k_m": "int4", "iq3_xs": "int4", "w8a8": "int8", "8": "int8", "nf4": "int4", "f16": "float16",
    "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8",
}  # fmt: skip


class TestFormat:
    @pytest.mark.parametrize(
        ("text", "format", "canonical"),
        [
            ("native", KVFormat(), "native"),
            ("int8", KVFormat("int8", "int8"), "int8"),
            (" INT4 , first = 16 ", KVFormat("int4", "int4", 16), "int4,first=16"),
            ("k=int8", KVFormat("int8"), "k=int8,v=native"),
            ("v=int4,k=int8,first=64", KVFormat("int8", "int4", 64), "k=int8,v=int4,first=64"),
            ("k=fp8,v=fp8", KVFormat("fp8", "fp8"), "fp8"),
            (
                "int4,first=16,native=0+-1",
                KVFormat("int4", "int4", 16, (0, -1)),
                "int4,first=16,native=0+-1",
            ),
            ("bfloat16,native=3", KVFormat("bfloat16", "bfloat16", native=(3,)), "bfloat16,native=3"),
        ],
    )
    def test_it_is_read_and_written(self, text: str, format: KVFormat, canonical: str) -> None:  # noqa: A002
        assert KVFormat.parse(text) == format
        assert str(format) == canonical
        assert KVFormat.parse(canonical) == format

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("int3", "kv 'int3' is not known; use native, float32, bfloat16, float16, fp8, int8, int4"),
            *((name, rf"\(nearest to yours: {ours}\)") for name, ours in FOREIGN.items()),
            ("", "int4$"),
            ("k=", "kv '' is not known"),
            ("k=int8,k=int8", "each once"),
            ("int8,int4", "each once"),
            ("int8,v=int4", "each once"),
            ("int8,first=1,first=2", "each once"),
            ("int8,last=3", "first=TOKENS"),
            ("int8,first=-1", "first of kv must be a whole number from 0 to 2,147,483,648, not -1"),
            ("int8,first=x", "first=TOKENS"),
            ("int8,first=1.5", "first=TOKENS"),
            ("int8,first=", "first=TOKENS"),
            ("int8,native=", "native=LAYERS"),
            ("int8,native=1++2", "native=LAYERS"),
            ("int8,native=1+1", "each once"),
            ("int8,", "kv must be one format"),
        ],
    )
    def test_what_is_wrong_is_refused_with_what_is_right(self, text: str, told: str) -> None:
        with pytest.raises(RequestError, match=told):
            KVFormat.parse(text)

    @pytest.mark.parametrize("fields", [{"k": "int5"}, {"first": 1.0}, {"first": True}, {"native": ("0",)}])
    def test_so_are_wrong_fields(self, fields: dict[str, Any]) -> None:
        with pytest.raises(RequestError):
            KVFormat(**fields)


class TestSpecs:
    @pytest.mark.parametrize("kind", KINDS)
    def test_by_default_a_model_is_kept_as_it_is(self, kind: str) -> None:
        config = config_of(kind)
        for spec, window in zip(specs_of(kind), config.windows, strict=True):
            if spec.state_bytes:
                continue
            layout, numbers = Heads(config.kv_heads, config.head_size), 2 * config.kv_heads * config.head_size
            if latent := config.latent:
                layout, numbers = Latent(latent.rank, latent.rope), latent.rank + latent.rope
            assert spec.parts == (Part(layout, AttentionWindow(window), F32, F32),)
            assert spec.bytes_per_token == 4 * numbers

    def test_formats_compose_with_layers_and_first_tokens(self) -> None:
        specs = specs_of("qwen2", "k=int8,v=fp8,first=7,native=0+-1")
        assert [len(spec.parts) for spec in specs] == [1, 2, 2, 1]
        assert specs[0].parts[0] == specs[3].parts[0] == Part(Heads(2, 16), AttentionWindow(), F32, F32)
        head, tail = specs[1].parts
        assert head == Part(Heads(2, 16), AttentionWindow(stop=7), F32, F32)
        assert tail == Part(Heads(2, 16), AttentionWindow(start=7), INT8, FP8)
        assert specs[1].bytes_per_token == 2 * (16 + 2 + 16)

    def test_the_dtype_of_the_model_named_is_native(self) -> None:
        assert specs_of("llama2", "float32,first=4") == specs_of("llama2", "native,first=4") == specs_of("llama2")
        assert len(specs_of("llama2", "v=float16,first=4")[0].parts) == 2

    def test_a_window_is_the_shorter_one_and_sinks_go_with_windows(self) -> None:
        assert [spec.window for spec in specs_of("qwen2-window", window=40, sinks=3)] == [
            *[AttentionWindow(40, 3)] * 2,
            *[AttentionWindow(32, 3)] * 2,
        ]
        own = [spec.window for spec in specs_of("qwen2-window", sinks=3)]
        assert own == [AttentionWindow()] * 2 + [AttentionWindow(32, 3)] * 2
        assert {spec.window for spec in specs_of("gpt2", window=9)} == {AttentionWindow(9)}

    def test_parts_keep_window_and_sinks(self) -> None:
        [spec, *_] = specs_of("llama2", "int8,first=3", window=5, sinks=4)
        assert [part.window for part in spec.parts] == [AttentionWindow(5, 4, 0, 3), AttentionWindow(5, 4, 3, None)]

    @pytest.mark.parametrize(
        ("kind", "options", "told"),
        [
            ("llama2", {"sinks": 4}, "give window as well"),
            ("llama2", {"window": 0}, "window must be a whole number from 1 to 2,147,483,648, not 0"),
            ("llama2", {"window": True}, "window must be"),
            ("llama2", {"window": 4, "sinks": -1}, "sinks must be a whole number from 0 to 2,147,483,648, not -1"),
            ("gpt2", {"window": 9, "sinks": 2}, "has learned ones: leave sinks out"),
            ("dynamic", {"window": 9}, "RoPE scaling that depends on the length"),
            ("dynamic", {"window": 9, "sinks": 1}, "RoPE scaling that depends on the length"),
        ],
    )
    def test_what_cannot_be_is_refused(self, kind: str, options: dict[str, int], told: str) -> None:
        with pytest.raises(RequestError, match=told):
            specs_of(kind, **options)

    @pytest.mark.parametrize("layer", [3, -4])
    def test_a_layer_that_is_not_there_is_refused(self, layer: int) -> None:
        with pytest.raises(RequestError, match=rf"there is no layer {layer}; use 0 to 2, or -1 to -3 backwards"):
            specs_of("llama2", f"int8,native={layer}")


SPECS = st.builds(
    LayerSpec,
    st.sampled_from([Heads(2, 16), Heads(1, 5)]),
    st.sampled_from(
        [AttentionWindow(), AttentionWindow(1), AttentionWindow(6), AttentionWindow(6, 2), AttentionWindow(40, 5)]
    ),
    st.sampled_from([F32, INT8, INT4]),
    st.sampled_from([F32, INT8, FP8]),
    st.sampled_from([0, 1, 4, 33]),
    native=st.just(F32),
)


@given(spec=SPECS, tokens=st.integers(0, 90))
def test_bytes_are_those_of_the_positions_the_next_row_reads(spec: LayerSpec, tokens: int) -> None:
    def token_bytes(position: int) -> int:
        k, v = (F32, F32) if position < spec.first else (spec.k, spec.v)
        return spec.layout.kv_heads * (k.nbytes(spec.layout.head_size) + v.nbytes(spec.layout.head_size))

    window, sinks = spec.window.size, spec.window.sinks
    read = [p for p in range(tokens) if window is None or p < sinks or p > tokens - window]
    assert spec.nbytes(tokens) == sum(map(token_bytes, read))
    for start in (0, tokens // 2):
        positions = range(start, tokens)
        assert spec.stored_bytes(positions) == sum(map(token_bytes, positions))
        for part in spec.parts:
            inside = [p for p in positions if part.window.start <= p and (part.window.stop or tokens) > p]
            assert list(part.stored(positions)) == inside
    assert spec.bytes_per_token == token_bytes(spec.first)


class TestGroups:
    def test_layers_that_keep_alike_are_a_group(self) -> None:
        groups = group_layers(specs_of("qwen2-window", "int4,first=7,native=3"))
        assert [(group.part.window, group.part.k.name, group.layers) for group in groups] == [
            (AttentionWindow(stop=7), "float32", (0, 1)),
            (AttentionWindow(start=7), "int4", (0, 1)),
            (AttentionWindow(32, stop=7), "float32", (2,)),
            (AttentionWindow(32, start=7), "int4", (2,)),
            (AttentionWindow(32), "float32", (3,)),
        ]
        assert groups[1].page_bytes(16) == 16 * 2 * 2 * 2 * (8 + 2)
        assert groups[0].window == AttentionWindow(stop=7)

    def test_one_that_keeps_all_of_a_text_comes_first(self) -> None:
        specs = specs_of("qwen2-window")
        assert [group.layers for group in group_layers(specs)] == [(0, 1), (2, 3)]
        assert [group.layers for group in group_layers(specs[::-1])] == [(2, 3), (0, 1)]

    def test_formats_of_k_and_v_are_told_apart(self) -> None:
        one, other = (replace(specs_of("llama2", kv)[0]) for kv in ("k=int8,v=int4", "k=int4,v=int8"))
        assert len(group_layers([one, other, one])) == 2


class TestSizes:
    def test_a_bounded_reach_gets_no_more_than_it_can_use(self) -> None:
        """A window of 32, chunks of 20, pages of 16: 51 tokens side by side lie in 5 pages at most."""
        full, windowed = groups_for(specs_of("qwen2-window"), 16, pages=1000, chunk=20, sequences=3)
        assert full == Group(1000, AttentionWindow(), 2 * 16 * 256)
        assert windowed == Group(15, AttentionWindow(32), 2 * 16 * 256)
        assert [group.pages for group in groups_for(specs_of("qwen2-window"), 16, 7, 20, 3)] == [7, 7]

    def test_first_tokens_take_their_pages_and_spare_the_others_theirs(self) -> None:
        """33 tokens lie in 3 pages, and the rest of a text begins in the last of them."""
        head, tail = groups_for(specs_of("llama2", "int8,first=33"), 16, pages=1000, chunk=512, sequences=4)
        assert (head.pages, tail.pages) == (4 * 3, 1000 - 2)

    @pytest.mark.parametrize("kv", ["native", "int8,first=33"])
    @pytest.mark.parametrize("window", [{}, {"window": 100}, {"window": 100, "sinks": 4}])
    @pytest.mark.parametrize("kind", ["llama2", "qwen2-window"])
    @pytest.mark.parametrize("memory", [0, 10_000, 300_000, 1_000_000, 10**12])
    def test_all_groups_fit_the_memory_and_one_page_more_does_not(
        self, kind: str, kv: str, window: dict[str, int], memory: int
    ) -> None:
        specs = specs_of(kind, kv, **window)

        def total(pages: int) -> int:
            groups = groups_for(specs, 16, pages, 64, 5)
            return sum((group.pages + 1) * group.page_bytes for group in groups)

        pages = pages_within(specs, 16, memory, chunk=64, sequences=5, most_tokens=900)
        assert 0 <= pages <= 5 * 57
        if pages:
            assert total(pages) <= memory
        if pages < 5 * 57:
            assert total(pages + 1) > memory
        assert (pages == 5 * 57) is (memory >= total(5 * 57))
