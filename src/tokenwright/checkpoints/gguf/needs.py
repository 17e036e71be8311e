"""The operations that architectures of GGUF files need and Tokenwright lacks, by the architecture's name."""

from collections.abc import Mapping

_BOTH_WAYS = "attention to later tokens"
NEEDS: Mapping[str, str] = {
    **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), "RWKV's recurrence"),
    **dict.fromkeys(("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed"), _BOTH_WAYS),
    **dict.fromkeys(("modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe"), _BOTH_WAYS),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), f"{_BOTH_WAYS}, for text by diffusion"),
    **dict.fromkeys(("t5", "t5encoder"), "an encoder with biases of relative positions"),
    **dict.fromkeys(("deci", "openelm"), "layers with other numbers of heads than others"),
    **dict.fromkeys(("phi2", "phimoe"), "a bias of the head"),
    **dict.fromkeys(("bloom", "mpt"), "biases of scores by the distance (ALiBi)"),
    **dict.fromkeys(("paddleocr", "hunyuan_vl"), "positions of a picture's parts"),
    "arctic": "experts beside an MLP of the same layer",
    "baichuan": "ALiBi in its 13B model, which the file does not tell from others",
    "bitnet": "norms before the last linears of attention and MLP",
    "chameleon": "a LayerNorm of each head of q and k",
    "clip": "an image encoder without a text model; give the file of the text model",
    "cogvlm": "weights of their own for the tokens of pictures",
    "dbrx": "the keys and tensor names of DBRX",
    "glm-dsa": "attention to the tokens that an indexer chooses",
    "grovemoe": "experts that share smaller ones",
    "llama4": "chunked attention, and experts whose input is scaled by their score",
    "mimo2": "values of another size than keys, beside windows",
    "minicpm3": "latent attention beside scaled embeddings, residuals and logits",
    "mistral4": "latent attention with queries scaled by their position",
    "plamo2": "norms of dt, B and C beside Mamba-2's heads",
    "plm": "latent attention before an MLP without gates",
    "smallthinker": "a router that reads the input of attention",
    "step35": "one gate for each head",
    "wavtokenizer-dec": "a decoder of sound",
}
