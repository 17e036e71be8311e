// One run, as far as the page knows it: what was asked, every frame so far, the text that grew, and sums over the
// frames. It is fed by a live stream, by the recording that ships with the page, or by a file; nothing in it knows
// which. Frames are only ever appended, so a step that was shown can be shown again without asking anyone.

import { signal } from "@preact/signals";
import type { EarlierStep } from "../visit/api";
import type { SceneToken } from "../stage/renderers/renderer";
import type { ModelCard, RunCard, RunState, StepFrame, TokenCard } from "../schema";
import { align, look, nameOf, quoted } from "../ui/text";
import { type Patch, patchesOf } from "./patches";

export type Origin = "live" | "recorded" | "file";

/** Sums over the frames up to and with one step. */
export interface Totals {
  layer_tokens: bigint;
  flops: bigint;
  flops_derived: bigint;
  kv_read: bigint;
  weight_bytes: bigint;
  forward_tokens: number;
  step_us: number;
}

const ZERO: Totals = {
  layer_tokens: 0n,
  flops: 0n,
  flops_derived: 0n,
  kv_read: 0n,
  weight_bytes: 0n,
  forward_tokens: 0,
  step_us: 0,
};

export function add(sum: Totals, frame: StepFrame): Totals {
  return {
    layer_tokens: sum.layer_tokens + frame.layer_tokens,
    flops: sum.flops + frame.flops,
    flops_derived: sum.flops_derived + frame.flops_derived,
    kv_read: sum.kv_read + frame.kv_read,
    weight_bytes: sum.weight_bytes + frame.weight_bytes,
    forward_tokens: sum.forward_tokens + frame.length,
    step_us: sum.step_us + frame.step_us,
  };
}

export class Run {
  readonly frames: StepFrame[] = [];
  readonly totals: Totals[] = [];
  /** One entry for each position: what it is, how it is labelled, and the piece of text it brought. */
  readonly tokens: TokenCard[] = [];
  readonly looks: SceneToken[] = [];
  readonly pieces: string[] = [];
  readonly patches: ReadonlyMap<number, Patch>; // of the prompt's pictures, by position
  /** The same text with the cache at each step (true) and at none (false), in a file that has both. */
  both: ReadonlyMap<boolean, Run> = new Map();
  readonly count = signal(0); // of frames
  /** Tokens of the prompt that an answer of the chat found in the cache; this run of the same prompt computes them anew. */
  reusedInChat = 0;
  readonly shared = signal(0); // tokens from the first whose pages other runs use too, as the pool counted last
  readonly state = signal<RunState>(PAUSED);
  readonly id = signal<string>(""); // the server's name for it; a rebuilt run has a new one
  readonly since = signal(0); // the first step that the server's run has; a rebuilt run begins where it was lost
  private readonly labels = new Map<number, TokenCard>();

  constructor(
    readonly model: ModelCard,
    readonly card: RunCard,
    readonly origin: Origin,
    readonly name = "", // of the file
  ) {
    this.id.value = card.run;
    this.since.value = card.first_step;
    this.label(card.tokens);
    this.label(card.written);
    const prompt = align(card.prompt, card.tokens);
    this.patches = patchesOf(card.pictures);
    card.tokens.forEach((token, i) => {
      const patch = this.patches.get(i); // is named by its row and column
      if (patch) this.grow({ ...token, text: `${patch.row + 1}·${patch.column + 1}`, special: false }, "prompt", "");
      else this.grow(token, "prompt", prompt[i] ?? "");
    });
    const written = align(card.written_text, card.written);
    card.written.forEach((token, i) => this.grow(token, "generated", written[i] ?? ""));
  }

  get promptTokens(): number {
    return this.card.tokens.length;
  }

  /** The number of the step that comes next. */
  get next(): number {
    return this.card.first_step + this.frames.length;
  }

  /** Whether no frame will come: the engine is done, and all that it told of is here (a slow page gets it later). */
  get ended(): boolean {
    const { state, steps } = this.state.value;
    return state === "failed" || (state === "done" && this.card.first_step + this.count.value >= steps);
  }

  /** Whether the server's run lacks steps that are here. */
  get rebuilt(): boolean {
    return this.since.value > this.card.first_step;
  }

  /** Takes over the run that the server made to continue this one. */
  continueAs(card: RunCard): void {
    this.since.value = card.first_step;
    this.id.value = card.run;
  }

  /** Ids after the prompt: what a lost run is rebuilt from. */
  written(): number[] {
    return this.tokens.slice(this.promptTokens).map((token) => token.id);
  }

  /** The steps that are here, for a run that continues this one. */
  earlier(): EarlierStep[] {
    return this.frames.map(({ start, length, layer_tokens, step_us, token }) => {
      return { start, length, layer_tokens: Number(layer_tokens), step_us, token };
    });
  }

  label(tokens: readonly TokenCard[]): void {
    for (const token of tokens) this.labels.set(token.id, token);
  }

  named(id: number): TokenCard {
    return this.labels.get(id) ?? { id, text: `#${id}`, special: false };
  }

  /** A token of the text, for sentences: the special one before all texts is the start. */
  called(position: number): string {
    const token = this.tokens[position];
    return quoted(token?.special ? nameOf(token.text, position) : (token?.text ?? ""));
  }

  allLabels(): TokenCard[] {
    return [...this.labels.values()];
  }

  /** Appends a frame. One that is known already is passed over; after a gap nothing may be appended. */
  push(frame: StepFrame): "new" | "known" | "gap" {
    if (frame.step < this.next) return "known";
    if (frame.step > this.next) return "gap";
    this.frames.push(frame);
    this.totals.push(add(this.totals.at(-1) ?? ZERO, frame));
    if (frame.token !== null) this.grow(this.named(frame.token), "generated", frame.text);
    this.count.value = this.frames.length;
    return "new";
  }

  /** How many tokens the text has after the frame at `index`; before the first one, those that it began with. */
  length(index: number): number {
    return this.frames[index]?.seq_len ?? this.promptTokens + this.card.written.length;
  }

  private grow(token: TokenCard, kind: SceneToken["kind"], piece: string): void {
    this.tokens.push(token);
    this.looks.push(look(token, kind, piece, this.looks.length));
    this.pieces.push(piece);
  }
}

const PAUSED: RunState = {
  kind: "state",
  state: "paused",
  steps: 0,
  cache: true,
  pace: null,
  lease_s: null,
  throttled: false,
  reason: null,
  message: "",
  watched: [0, 0],
  summary: null,
};
