// The text itself, up to the shown step: each token a span, shaded by how much the shown attention row read it. It is
// also the list of tokens for keyboard and screen reader (one tab stop, arrows move). The spans are kept by hand, since
// a step adds one and changes the shade of a few: a long text must not be compared from its beginning each time.

import { drawn, verbatim } from "../../language/language";
import { effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { numbered, percent } from "../../ui/format";
import { lanes } from "../../stage/lanes";
import { changed } from "../../stage/kept";
import { row } from "../answers/attention-row";
import { WEIGHTS } from "../../stage/scene";
import type { Run } from "../run";
import * as player from "../play/player";
import { hovered, last, length, result, run, shown } from "../../visit/store";
import { written } from "../../visit/clock";
import { bytesOf, marked, nameOf } from "../../ui/text";
import { author } from "../../visit/messages";

const SHADES = 20;

export function Text() {
  const root = useRef<HTMLDivElement>(null);
  useEffect(() => (root.current ? new Flow(root.current).run() : undefined), []);
  return (
    <section class="text" aria-label="Text">
      <div class="text-head">
        <h2 class="sr">Text</h2>
        <Readout />
      </div>
      {lanes.value !== null && <RaceText />}
      <div
        class="flow"
        hidden={lanes.value !== null}
        ref={root}
        role="listbox"
        aria-label="Tokens of the text"
        aria-orientation="horizontal"
        data-text=""
      />
    </section>
  );
}

/** What each lane of the race has written. */
function RaceText() {
  const { cached, uncached } = lanes.value ?? {};
  return (
    <dl class="race-text">
      <dt>with cache</dt>
      <dd data-lane="cached">{line(cached?.text)}</dd>
      <dt>without</dt>
      <dd data-lane="uncached">{line(uncached?.text)}</dd>
    </dl>
  );
}

const line = (text = ""): string => text.replaceAll("\n", "⏎").trimStart();

/** One line about the token under the pointer or the keyboard; at rest about what wrote the text. */
function Readout() {
  const current = run.value;
  const position = hovered.value;
  if (current === null || lanes.value !== null) return <p class="readout" />;
  const token = position === null ? undefined : current.tokens[position];
  if (position === null || token === undefined || position >= length.value) {
    if (result.value !== null) return <p class="readout" />; // the band of the result is there
    return <p class="readout author">{author.value}</p>;
  }
  const code = row.value?.codes[position];
  return (
    <p class="readout">
      <b>{wordFor(current, position)}</b>
      <span>token {numbered(position)}</span>
      <span>id {token.id}</span>
      <span>{position < current.promptTokens ? "prompt" : "generated"}</span>
      <span>{code === undefined ? "not read yet" : `weight ${percent(WEIGHTS[code] ?? 0)}`}</span>
    </p>
  );
}

/** A token as text; a byte of a character as that character and the byte. */
function wordFor(current: Run, position: number): string {
  const token = current.tokens[position];
  if (token === undefined) return "";
  const bytes = bytesOf(token);
  if (bytes === null) return marked(token.text);
  let end = position;
  while (current.pieces[end] === "" && end < current.pieces.length - 1) end++;
  return `${current.pieces[end] ?? ""} (byte ${bytes})`.trim();
}

class Flow {
  private readonly parts = { prompt: part("prompt"), generated: part("generated") };
  private readonly spans: HTMLElement[] = [];
  private shades = new Int8Array(0);
  private current: Run | null = null;
  private stop = -1; // position of the tab stop
  private marked = -1;

  constructor(private readonly root: HTMLElement) {
    root.append(this.parts.prompt, this.parts.generated);
  }

  run(): () => void {
    const stops = [
      effect(() => {
        this.sync(run.value, length.value);
        void written.value; // what a step writes takes its place when it is there
        this.shade(row.value?.codes ?? null);
        void shown.value;
      }),
      effect(() => this.mark(hovered.value)),
      effect(() => {
        void length.value;
        this.spans.forEach((span, position) => span.classList.toggle("changed", changed.value.has(position)));
      }),
    ];
    const { root } = this;
    root.addEventListener("pointerover", (event) => (hovered.value = this.positionOf(event.target)));
    root.addEventListener("pointerleave", () => (hovered.value = null));
    root.addEventListener("click", (event) => this.visit(this.positionOf(event.target)));
    root.addEventListener("focusin", (event) => (hovered.value = this.positionOf(event.target)));
    root.addEventListener("focusout", () => (hovered.value = null));
    root.addEventListener("keydown", (event) => this.onKey(event));
    return () => stops.forEach((end) => end());
  }

  private sync(next: Run | null, count: number): void {
    if (next !== this.current) {
      this.current = next;
      for (const span of this.spans) span.remove();
      this.spans.length = 0;
      this.shades = new Int8Array(0);
      this.stop = -1;
    }
    if (next === null) return;
    const end = Math.min(count, next.tokens.length);
    while (this.spans.length > end) this.spans.pop()?.remove();
    this.spans.at(-1)?.classList.remove("newest");
    for (let i = this.spans.length; i < end; i++) this.spans.push(this.append(next, i));
    this.spans.at(-1)?.classList.add("newest");
    this.moveStop(end - 1);
    if (shown.peek() === last.peek()) this.root.scrollTop = this.root.scrollHeight;
  }

  private append(next: Run, position: number): HTMLElement {
    const token = next.tokens[position];
    const piece = next.pieces[position] ?? "";
    const span = document.createElement("span");
    span.className = token?.special ? "token special" : "token";
    span.dataset.position = String(position);
    span.role = "option";
    span.tabIndex = -1;
    span.textContent = piece;
    span.ariaSelected = "false";
    span.style.setProperty("--w", "0%"); // as after a shade, so that no span tells which steps were shown before
    span.ariaLabel = drawn(
      `${numbered(position)}: ${token?.text.trim() === "" ? "space" : verbatim(token?.text ?? "")}, id ${token?.id}`,
    );
    // Drawn by a style, so that it is not part of the text.
    const bytes = token ? bytesOf(token) : null;
    if (bytes !== null)
      span.dataset.bytes = bytes; // a part of a character, which stands whole in the last part's place
    else if (piece === "") span.dataset.look = token?.special ? nameOf(token.text, position) : "·";
    else if (piece.trim() === "" && piece.includes("\n")) span.dataset.look = "⏎".repeat(piece.split("\n").length - 1); // a line that is empty has tokens in it
    (position < next.promptTokens ? this.parts.prompt : this.parts.generated).append(span);
    return span;
  }

  private shade(codes: Uint8Array | null): void {
    if (this.shades.length < this.spans.length) {
      const more = new Int8Array(Math.ceil(this.spans.length * 1.5) + 64);
      more.set(this.shades);
      this.shades = more;
    }
    this.spans.forEach((span, i) => {
      const code = codes?.[i] ?? 0; // the code is the square root of the weight: small ones stay visible
      const shade = Math.round((code / 255) * SHADES);
      if (this.shades[i] === shade) return;
      this.shades[i] = shade;
      span.style.setProperty("--w", `${(shade / SHADES) * 100}%`);
    });
    this.shades.fill(0, this.spans.length);
  }

  private mark(position: number | null): void {
    this.spans[this.marked]?.classList.remove("hovered");
    this.spans[this.marked]?.setAttribute("aria-selected", "false");
    this.marked = position ?? -1;
    this.spans[this.marked]?.classList.add("hovered");
    this.spans[this.marked]?.setAttribute("aria-selected", "true");
  }

  private moveStop(position: number): void {
    const before = this.spans[this.stop];
    if (before) before.tabIndex = -1;
    this.stop = position;
    const now = this.spans[position];
    if (now) now.tabIndex = 0;
  }

  /** A click shows the step that wrote the token. */
  private visit(position: number | null): void {
    const current = run.peek();
    if (position === null || current === null) return;
    const index = current.frames.length - (current.tokens.length - position);
    if (position >= current.promptTokens && index >= 0) player.seek(index);
  }

  private onKey(event: KeyboardEvent): void {
    const at = this.positionOf(event.target);
    if (at === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const end = this.spans.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: end }[event.key];
    if (event.key === "Enter") this.visit(at);
    else if (to === undefined) return;
    else {
      const next = Math.max(0, Math.min(end, to));
      this.moveStop(next);
      this.spans[next]?.focus();
    }
    event.preventDefault();
  }

  private positionOf(target: EventTarget | null): number | null {
    const span = target instanceof Element ? target.closest<HTMLElement>(".token") : null;
    return span === null ? null : Number(span.dataset.position);
  }
}

function part(name: string): HTMLElement {
  const span = document.createElement("span");
  span.dataset.part = name;
  span.role = "group";
  span.ariaLabel = name === "prompt" ? "Prompt" : "Generated";
  return span;
}
