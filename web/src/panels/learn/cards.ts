// The words of the eight cards, in three levels: at most 60 words, in full, and as formulas. Figures are not here: what
// a card shows of the model comes from the engine.

export const LEVELS = ["60 words", "in full", "formula"] as const;
export type Level = (typeof LEVELS)[number];

export interface Card {
  id: string;
  name: string; // on its button
  title: string;
  short: string;
  full: readonly string[];
  formulas: readonly (readonly [string, string])[]; // a formula and what it says
}

export const CARDS: readonly Card[] = [
  {
    id: "loop",
    name: "The loop",
    title: "A text is a loop that runs once for each token",
    short:
      "The model does not write a text. It writes one token, a word or a part of a word, like a typewriter with one stroke at a time. The text so far goes in, a probability for every possible token comes out, one is drawn and appended. Then the same again, until an end token or the limit.",
    full: [
      "A language model has one function: from the tokens so far to a probability for every token of its vocabulary. What looks like a finished answer is a loop around it. Each new token is appended to the text, and the longer text is the input of the next step. This is called autoregressive.",
      "Two things are often mixed up. What usually follows a phrase was learned in training; it is in the weights, which are fixed now. What this text says is in the context, and the model looks at it anew at every step.",
      "The loop ends when the end token is drawn, when a stop text appears, or when max tokens are written. The limit truncates: it cuts an answer, it does not make it shorter. To get a short answer, ask for a short form.",
    ],
    formulas: [
      ["p(x₁ … x_T) = ∏ p(x_t | x₁ … x_{t−1})", "the probability of a text is the product of those of its steps"],
      ["x_t ~ softmax(z_t / T)", "a step: logits z_t, one number for each id of the vocabulary; one id is drawn"],
      ["E2E = TTFT + (n − 1) · TPOT", "time of an answer of n tokens: first token, then n − 1 strokes"],
    ],
  },
  {
    id: "phases",
    name: "Prefill, decode",
    title: "Reading goes all at once, writing one stroke at a time",
    short:
      "The prompt is known, so all its tokens go through the layers together: prefill. Each layer saves a key and a value for each. What comes next is not known, so it goes one token at a time: decode. Prefill is limited by arithmetic. Decode reads all weights for a single token, and is limited by memory bandwidth.",
    full: [
      "Prefill: N tokens are one matrix product per weight matrix. The weights are read once and used N times, so the machine computes about as fast as it can. The result is the first token and a cache of N columns. Its time is the time to first token (TTFT).",
      "Decode: only the newest token goes through the layers. All weights are read again, and the K and V of the whole text, for one row of arithmetic. That is why a step with one token takes far more time per token than prefill.",
      "Prefill does not usually take most of the time. That depends on how much is read and how much is written: a long document with a yes or no is prefill-bound, a story from one sentence is decode-bound.",
    ],
    formulas: [
      ["prefill: 2·P_b·N + 2·P_lm + Σ_{i=1..N} A(i)", "FLOP for N prompt tokens, with logits for the last"],
      ["decode: 2·(P_b + P_lm) + A(t)", "FLOP for one token at a context of t; A(t) = 4·H·D·Σ_l min(t, W_l)"],
      ["bytes read ≈ weights + c · t", "per decode step; c: K and V of one token in all layers"],
    ],
  },
  {
    id: "qkv",
    name: "Q, K and V",
    title: "Q is used once and thrown away; K and V are read again",
    short:
      "In each layer a token makes three vectors. Its query Q is compared with the keys K of all earlier tokens; the result says how much of each value V it takes. Later tokens need its K and V, so these are kept. Its Q is never needed again: it was the question of this one step.",
    full: [
      "Attention is how a token looks at the tokens before it. The query of the newest token is compared with every key; the softmax of these scores is a weight for each position, and the weighted sum of the values goes on. The beams on the stage are these weights for one head.",
      "Why not keep Q? The score of positions i and j uses the query of the later one and the key of the earlier one. When token t + 1 arrives, it brings its own query, and asks for all keys up to t. The query of token t would only be needed to compute row t again, and that row is done.",
      "K and V of past tokens do not change: because of the causal mask no later token reaches back, and because positions are fixed: keys are stored rotated at their place. Change a token, or move the text, and all K and V behind it are wrong.",
    ],
    formulas: [
      ["q, k, v = W_q h, W_k h, W_v h", "of each token's state h, in each layer; q and k are then rotated (RoPE)"],
      ["a_tj = softmax_j≤t (q_t · k_j / √D)", "row t: one query, all keys up to t"],
      ["o_t = Σ_j≤t a_tj · v_j", "only q_t is in it: q_1 … q_{t−1} are not"],
    ],
  },
  {
    id: "notebook",
    name: "Its size",
    title: "The cache is a notebook: two lists per layer, for this text",
    short:
      "The KV cache is the notebook of one text: in every layer a key and a value for each token. It grows by the same bytes with each token. It is not what the model knows: that is in the weights. What it takes depends on the layers, the KV heads and the number format.",
    full: [
      "The bytes of one token: two (K and V), times the layers, times the KV heads, times the size of a head, times the bytes of a number. KV heads, not query heads: Llama-3-8B has 8 for its 32 query heads, so 8,192 tokens in bf16 are 1 GiB and not 4; 4 GiB is Llama-2-7B.",
      "A window, a latent (MLA) or a quantised format changes the formula. With them, no rule like “1 MB per token” holds.",
      "Does the cache exceed the weights? For one text only very late: Llama-3-8B at 122,537 tokens. But the weights are there once, and each text of a batch has a cache of its own: with 8 texts it is at 15,318.",
    ],
    formulas: [
      ["c = Σ_l 2 · G · D · e", "bytes of one token; G: KV heads, D: head size, e: bytes of a number, with scales"],
      ["resident = Σ_l c_l · min(t, W_l + s)", "bytes of a text; W_l: window of a layer, s: sinks"],
      ["t = W / (c · B)", "where the caches of B texts take as much as W bytes of weights"],
    ],
  },
  {
    id: "savings",
    name: "What it saves",
    title: "Without the cache every step reads the whole text again",
    short:
      "Take the cache away, and all earlier tokens go through all layers again, at every step, for the same result. With it, a step computes one token. The text is the same; the work is not. Attention still looks at all earlier tokens: the cache removes one factor of the length, not both.",
    full: [
      "Count tokens through the layers. With N prompt tokens and T written ones: N + T − 1 with the cache, and the sum of t from N to N + T − 1 without. The ratio grows with the length.",
      "A step without the cache costs 2·P·t for the matrix products and about 2·L·d·t² for attention; with it, 2·P and 4·L·d·t. So a cached step is not constant and not simply linear: it is a large constant plus a small slope, and nearly flat in the range of most texts. The whole text stays quadratic in attention.",
      "The clock shows less than the FLOP: many rows at once use the machine better than one row. Decode is limited by reading weights, which a pass over the whole text does just once as well.",
    ],
    formulas: [
      ["cached: N + T − 1", "tokens through the layers"],
      ["uncached: Σ t for t = N … N + T − 1", "= T·N + T(T − 1)/2"],
      ["N²·P + N³·L·d → N·P + N²·L·d", "order of the whole work: one factor of the length is gone"],
    ],
  },
  {
    id: "dial",
    name: "Sampling",
    title: "The model gives probabilities; temperature decides how varied the draw is",
    short:
      "The last layer gives a number for every id: the logits. Temperature divides them before they become probabilities: low sharpens, high flattens, 0 takes the largest. Top-k and top-p cut the tail. Then one random number picks an id. The seed fixes that number, so the same seed writes the same text.",
    full: [
      "Sampling is not part of the model. The same logits give a predictable text at temperature 0 and a chaotic one at 2. The entropy says in bits how open a step is: 0 is certain, 1 a coin.",
      "Top-k keeps the k most probable ids, top-p the smallest set whose probabilities reach p. What is cut can never be drawn; the rest is scaled up to 1.",
      "Greedy takes the likeliest token at each step. That is not the likeliest text: a good first word may lead nowhere. Beam search keeps several texts at once and compares their sums of log-probabilities.",
    ],
    formulas: [
      ["p_i = exp(z_i / T) / Σ_j exp(z_j / T)", "temperature T on logits z"],
      ["H = −Σ p_i log₂ p_i", "entropy in bits"],
      ["x = F⁻¹(u), u = hash(seed, position)", "the draw: the id where the summed probabilities pass u"],
    ],
  },
  {
    id: "smaller",
    name: "Smaller",
    title: "Windows, sharing and fewer bits: three ways to a smaller cache",
    short:
      "Three things shrink the cache. A window keeps only the last tokens; many heads rest on the very first ones, so a few of these stay too: sinks. Texts with the same beginning share its pages. And K and V can be stored in 8 or 4 bits. Each has a price, which can be measured.",
    full: [
      "Window: older K and V are dropped, and memory stops growing. What was in them is gone. Softmax weights must sum to 1, so heads that find nothing put their weight on the first token. If that falls out of the window, the text breaks; keeping a few sinks saves it.",
      "Sharing: K and V depend on all tokens before, and on nothing behind. So texts with the same first tokens have the same first pages. They are shared by whole pages; a text that differs in its first token shares nothing. A salt keeps the pages of one client from another.",
      "Fewer bits: 32 numbers share a scale, so int8 is 1.0625 bytes a number and int4 0.5625. Keys and values need not have the same format.",
    ],
    formulas: [
      ["row t reads {1 … s} ∪ {t − W + 1 … t}", "window W with s sinks"],
      ["KL(p ‖ q) = Σ p log(p / q)", "what a smaller cache changes: p with the full cache, q without, per token"],
      ["e = bits / 8 + 2 / 32", "bytes of a quantised number, with a float16 scale for 32 of them"],
    ],
  },
  {
    id: "training",
    name: "Training",
    title: "Training reads a text once; inference writes it in a loop",
    short:
      "In training the whole text is there. One pass gives every position its probabilities for the next token, and the causal mask hides what comes later. The loss is how surprised it is at the real one. No loop, no cache. Inference has only the past, so it must go step by step: that is what the cache is for.",
    full: [
      "Teacher forcing: at each position the model sees the true tokens before it, never its own guesses. All positions are computed at once, each in its own row under the mask, so a text of n tokens gives n − 1 losses in one pass. Training then changes the weights so that the mean loss falls.",
      "In one pass each token makes its Q, K and V exactly once. Nothing is computed again, so there is nothing to cache.",
      "At inference the weights are fixed. The model no longer learns: what it “remembers” of your text is the cache, and it is gone with the text. The pass below is real: the engine scores the very text on the stage.",
    ],
    formulas: [
      ["loss_t = −log p(x_t | x₁ … x_{t−1})", "in nats, of every position in one pass"],
      ["mean loss = (1 / (n − 1)) Σ loss_t", "perplexity = e^(mean loss)"],
      ["mask: row t sees columns 1 … t", "the triangle: half of the n × n pairs"],
    ],
  },
];

export const words = (text: string): number => text.split(/\s+/).filter((word) => word !== "").length;
