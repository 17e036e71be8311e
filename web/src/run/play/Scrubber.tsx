// The steps of a run as bars that can be scrubbed, in two strips. Work, in the transport: as high as the tokens that went
// through the layers, flat with the cache and a ramp without; a line says what the other way takes. Time, in the drawer: as high as the step took, stacked by what
// the time went into, with the running median as a line, and p50 and p95 of the steps of the shown one's kind in figures and
// as dotted lines; a bar that is far higher than the others is cut and has a break mark. Steps that computed something again
// stand on a hatched vermillion foot. Many steps share a pixel: then the longest of them is drawn.

import { translated } from "../../language/language";
import { type ReadonlySignal, computed, effect, untracked } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { count, joined, micros, numbered, plural } from "../../ui/format";
import { type Bar, lanes } from "../../stage/lanes";
import * as player from "./player";
import { frame, last, run, shown } from "../../visit/store";
import { theme } from "../../visit/theme";
import { Figure } from "../../ui/Stat";
import type { StepFrame } from "../../schema";

export const PARTS = [
  ["attention", "attention"],
  ["mlp", "MLP"],
  ["head", "LM head"],
  ["sampling", "sampling"],
  ["overhead", "rest"],
] as const;

type Part = (typeof PARTS)[number][0];

/** What a step's time went into, in µs. The rest is what no other part accounts for. */
export function shares(step: Partial<StepFrame>): Record<Part, number> {
  const {
    attention_us: attention = 0,
    mlp_us: mlp = 0,
    head_us: head = 0,
    sampling_us: sampling = 0,
    step_us: all = 0,
  } = step;
  return { attention, mlp, head, sampling, overhead: Math.max(0, all - attention - mlp - head - sampling) };
}

const FOOT = 5; // px, below the bars: the mark of recomputing
const WIDEST = 26; // px of one bar
const HEADROOM = 1.12;
const WORDS = 14; // px over the bars of the work, for what they are
const USUAL = 0.95; // share of the steps that must be under the top of the scale
const WINDOW = 9; // steps of the running median

type Mode = "time" | "work";

type Step = Bar & Partial<StepFrame>; // a race has only the work

/** The bars: of the work the race's while it is on the stage. A run's array grows in place, so its length is asked for. */
function barsOf(mode: Mode): readonly Step[] {
  void last.value;
  return (mode === "work" ? lanes.value?.bars : undefined) ?? run.value?.frames ?? [];
}

/** The bar that is shown: of a race the newest. */
const shownOf = (mode: Mode): number =>
  mode === "work" && lanes.value !== null ? lanes.value.bars.length - 1 : shown.value;

/** What the height of a step's bar stands for. */
const heightOf = (mode: Mode, step: Step): number =>
  mode === "time" ? (step.step_us ?? 0) : Number(step.layer_tokens);

/** The work of a step the other way: layer-tokens without the cache, where it had it; with it, where it had none. */
export function otherWay({ layer_tokens, start, length, recomputed, cache }: Step): number {
  const each = Number(layer_tokens) / Math.max(1, length);
  return each * (cache ? start + length : length - recomputed);
}

const topOf = (mode: Mode) => computed(() => ceiling(mode, barsOf(mode)));
const tops: Record<Mode, ReadonlySignal<number>> = { time: topOf("time"), work: topOf("work") };

/** What a step is compared with: those that also computed one token with the cache, or also all tokens without it. The
 * steps that read the prompt or fill the cache again are of neither kind. */
const kindOf = (step: StepFrame): "cached" | "uncached" | null =>
  step.token === null || step.start + step.recomputed === 0
    ? null
    : !step.cache
      ? "uncached"
      : step.length === 1
        ? "cached"
        : null;

/** Times of the steps of the shown one's kind, sorted, in µs. */
const times = computed<readonly number[]>(() => {
  void last.value;
  const kind = frame.value && kindOf(frame.value);
  if (kind === null) return [];
  const alike = (run.value?.frames ?? []).filter((step) => kindOf(step) === kind);
  return alike.map((step) => step.step_us).sort((a, b) => a - b);
});

/** The smallest of the sorted times that so large a share of them does not exceed (nearest rank). */
const percentile = (sorted: readonly number[], share: number): number =>
  sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? 0;

const MARKS = [
  ["p50", 0.5],
  ["p95", 0.95],
] as const;

/** The bars of the work, in the transport. */
export function Scrubber() {
  const step = frame.value;
  const race = lanes.value;
  const value = race
    ? `the race: ${plural(race.cached.place.done, "step")} with the cache, ${race.uncached.place.done} without`
    : step
      ? `step ${numbered(step.step)}, ${count(step.layer_tokens)} layer-tokens`
      : "no step yet";
  return (
    <div class="scrubber">
      <Strip mode="work" name="Step" value={value} />
    </div>
  );
}

/** The bars of the time, and what it went into. */
export function Times() {
  const step = frame.value;
  const cut = (run.value?.frames ?? []).filter((one) => one.step_us > tops.time.value).length;
  return (
    <section class="instrument times" aria-labelledby="times-name">
      <header>
        <h2 id="times-name">Time</h2>
        <span class="hint">of each step</span>
      </header>
      <div class="scrubber">
        <Strip
          mode="time"
          name="Step, by time"
          value={step ? `step ${numbered(step.step)}, ${joined(micros(step.step_us))}` : "no step yet"}
        />
      </div>
      <ul class="parts" aria-label="Time of the shown step">
        {PARTS.map(([part, name]) => (
          <li key={part}>
            <span class={`swatch time-${part}`} aria-hidden="true" />
            {name}
            <span class="part-time">{step ? joined(micros(shares(step)[part])) : ""}</span>
          </li>
        ))}
        {times.value.length > 0 &&
          MARKS.map(([name, share]) => (
            <li key={name}>
              {name}
              <Figure
                name={`step_us_${name}`}
                value={percentile(times.value, share)}
                source="derived"
                unit="us"
                meaning={`${share * 100} % of ${plural(times.value.length, "step")} like this one took no longer (nearest rank; the prompt's steps left out)`}
              />
            </li>
          ))}
        {step && (
          <li class="scale" title="What the full height stands for, and how many bars are higher and cut">
            full height {joined(micros(Math.round(tops.time.value)))}
            {cut > 0 && `; ${plural(cut, "bar")} cut`}
          </li>
        )}
      </ul>
    </section>
  );
}

function Strip({ mode, name, value }: { mode: Mode; name: string; value: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => (canvas.current ? watch(canvas.current, mode) : undefined), []);
  return (
    <canvas
      ref={canvas}
      role="slider"
      tabIndex={0}
      aria-label={name}
      aria-valuemin={1}
      aria-valuemax={Math.max(1, barsOf(mode).length)}
      aria-valuenow={Math.max(1, shownOf(mode) + 1)}
      aria-valuetext={value}
    />
  );
}

interface Plan {
  width: number; // CSS pixels of one step
  from: number; // left edge
}

/** The bars fill the width once there are enough of them; before that they keep a width that can be aimed at. */
function plan(count: number, width: number): Plan {
  return { width: Math.min(WIDEST, width / Math.max(1, count)), from: 0 };
}

function watch(canvas: HTMLCanvasElement, mode: Mode): () => void {
  const sizes = new ResizeObserver(() => draw(canvas, mode));
  sizes.observe(canvas);
  const stop = effect(() => {
    void [barsOf(mode), shownOf(mode), theme.value];
    draw(canvas, mode);
  });
  const seek = (event: PointerEvent) => {
    const box = canvas.getBoundingClientRect();
    const { width } = plan(last.peek() + 1, box.width);
    if (last.peek() >= 0) player.seek(Math.max(0, Math.floor((event.clientX - box.left) / width)));
  };
  canvas.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    canvas.setPointerCapture(event.pointerId);
    seek(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (canvas.hasPointerCapture(event.pointerId)) seek(event);
  });
  return () => {
    sizes.disconnect();
    stop();
  };
}

function draw(canvas: HTMLCanvasElement, mode: Mode): void {
  const { clientWidth: width, clientHeight: height } = canvas;
  const context = canvas.getContext("2d");
  if (context === null || width === 0) return;
  const ratio = Math.min(devicePixelRatio, 2);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const [steps, now] = untracked(() => [barsOf(mode), shownOf(mode)]);
  const style = getComputedStyle(canvas);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const floor = height - FOOT - 1;
  context.fillStyle = colour("--line");
  context.fillRect(0, floor, width, 1);
  if (steps.length === 0) return;

  const bar = plan(steps.length, width).width;
  const most = tops[mode].peek();
  const gap = bar >= 4 ? 1 : 0;
  const colours = new Map(PARTS.map(([part]) => [part, colour(`--time-${part}`)]));
  const hatch = pattern(context, colour("--recomputed"));
  const switches: [x: number, on: boolean][] = [];
  for (const { index, x, span } of columns(mode, steps, bar, now)) {
    const step = steps[index];
    if (!step) continue;
    if (index === now) {
      context.fillStyle = colour("--raised");
      context.fillRect(x, 0, Math.max(2, span), height);
    }
    const clipped = heightOf(mode, step) > most;
    const scale = (floor - (mode === "work" ? WORDS : 2)) / (clipped ? heightOf(mode, step) : most);
    context.globalAlpha = index <= now ? 1 : 0.35;
    let y = floor;
    const stack = (amount: number, style: string | CanvasPattern) => {
      const size = amount * scale;
      context.fillStyle = style;
      context.fillRect(x, y - size, Math.max(0.5, span - gap), size);
      y -= size;
    };
    if (mode === "time") {
      const times = shares(step);
      for (const [part] of PARTS) stack(times[part], colours.get(part) ?? "");
    } else {
      const each = Number(step.layer_tokens) / Math.max(1, step.length);
      stack(Math.max(each * (step.length - step.recomputed), most / floor), colour("--fresh"));
      stack(each * step.recomputed, hatch ?? colour("--recomputed"));
      context.fillStyle = colour(step.cache ? "--recomputed" : "--kept");
      if (step.token !== null) context.fillRect(x, floor - otherWay(step) * scale - 1, Math.max(1, span - gap), 2);
    }
    if (index > 0 && step.cache !== steps[index - 1]?.cache && lanes.peek() === null) switches.push([x, step.cache]);
    if (clipped) breakMark(context, x, span - gap, colour("--bg"));
    if (step.recomputed > 0) {
      context.fillStyle = hatch ?? colour("--recomputed");
      context.fillRect(x, floor + 1, span, FOOT);
    }
    context.globalAlpha = 1;
    if (index === now) {
      context.fillStyle = colour("--ink");
      context.fillRect(x, height - 2, Math.max(3, span - gap), 2);
    }
  }
  if (mode === "work") return label(context, steps, bar, floor, switches, colour);
  context.fillStyle = colour("--ink");
  for (const [, share] of times.peek().length > 0 ? MARKS : []) {
    const y = floor - (Math.min(percentile(times.peek(), share), most) / most) * (floor - 2);
    for (let x = 0; x < steps.length * bar; x += 6) context.fillRect(x, Math.round(y), 2, 1);
  }
  if (steps.length < WINDOW) return;
  context.strokeStyle = colour("--ink");
  context.lineWidth = 1.25;
  medianLine(context, steps, bar, floor);
}

/** Over the bars of the work: where the cache was switched, and which way; what the bars are; and at the end of the last
 * one, where there is room, which way of the step is how high. A word that finds no room is left out. */
function label(
  context: CanvasRenderingContext2D,
  steps: readonly Step[],
  bar: number,
  floor: number,
  switches: readonly [x: number, on: boolean][],
  colour: (name: string) => string,
): void {
  const { clientWidth: width } = context.canvas;
  const taken: [from: number, to: number][] = [];
  context.textBaseline = "top";
  const write = (text: string, from: number, free: number): boolean => {
    const to = from + context.measureText(text).width;
    if (from < 0 || to > width || taken.some(([left, right]) => from < right + free && to + free > left)) return false;
    taken.push([from, to]);
    context.fillText(text, from, 0);
    return true;
  };
  context.font = `600 11px ${colour("--sans")}`;
  for (const [x, on] of switches) {
    context.fillStyle = colour(on ? "--kept-ink" : "--recomputed-ink");
    context.fillRect(Math.round(x), 0, 1.5, floor);
    const words = translated(on ? "cache on" : "cache off");
    const before = x - 5 - context.measureText(words).width;
    const places = on ? [x + 6, before] : [before, x + 6];
    places.some((from) => write(words, from, 5));
  }
  context.font = `11px ${colour("--sans")}`;
  context.fillStyle = colour("--soft");
  const step = steps.at(-1);
  const from = steps.length * bar + 8;
  const most = tops.work.peek();
  const free =
    from + (step === undefined ? 0 : context.measureText(`${translated("without")} ${count(most)}`).width) + 8;
  const titles = ["cells computed in each step", "cells per step"].map(translated);
  const end = (text: string): number => width - context.measureText(text).width;
  const beside = titles.some((text) => end(text) > free && write(text, end(text), 8)); // beside the bars, if there is room
  if (!beside) titles.some((text) => write(text, 0, 8) || write(text, end(text), 8));
  if (step === undefined || step.token === null) return;
  const [own, other] = [Number(step.layer_tokens), otherWay(step)];
  for (const [amount, name, ink] of [
    [step.cache ? own : other, "with cache", "--kept-ink"],
    [step.cache ? other : own, "without", "--recomputed-ink"],
  ] as const) {
    const y = Math.min(floor - 10, floor - (amount / most) * (floor - WORDS) - 5);
    const words = `${translated(name)} ${count(amount)}`;
    context.fillStyle = colour(ink);
    if (own !== other && from + context.measureText(words).width < width)
      context.fillText(words, from, Math.max(WORDS, y));
  }
}

/** Two slanting gaps: the bar is higher than the scale. */
function breakMark(context: CanvasRenderingContext2D, x: number, span: number, ground: string): void {
  context.strokeStyle = ground;
  context.lineWidth = 2;
  context.beginPath();
  for (const y of [8, 13]) {
    context.moveTo(x - 1, y + 2);
    context.lineTo(x + span + 1, y - 2);
  }
  context.stroke();
}

/** The running median of the times, as a line: what a step usually takes here, whatever disturbed one of them. */
function medianLine(context: CanvasRenderingContext2D, steps: readonly Step[], bar: number, floor: number): void {
  const half = WINDOW >> 1;
  const every = Math.max(1, Math.floor(steps.length / 300));
  context.beginPath();
  for (let index = 0; index < steps.length; index += every) {
    const near = steps.slice(Math.max(0, index - half), index + half + 1).map((step) => heightOf("time", step));
    const median = near.sort((a, b) => a - b)[near.length >> 1] ?? 0;
    const y = floor - (Math.min(median, tops.time.peek()) / tops.time.peek()) * (floor - 2);
    if (index === 0) context.moveTo(0, y);
    context.lineTo((index + 0.5) * bar, y);
  }
  context.stroke();
}

/** The top of the scale: a few steps that a busy machine made long may stick out, or others would vanish beside them. */
function ceiling(mode: Mode, steps: readonly Step[]): number {
  if (mode === "work") return Math.max(1, ...steps.map((step) => Math.max(heightOf(mode, step), otherWay(step))));
  const heights = steps.map((step) => heightOf(mode, step)).sort((a, b) => a - b);
  const most = Math.max(1, heights.at(-1) ?? 1);
  const usual = heights[Math.floor(USUAL * (heights.length - 1))] ?? most;
  return most > usual * 2 ? usual * 1.5 : most * HEADROOM;
}

/** Where each bar stands; where steps share a pixel, that of the longest one, or of the shown one. */
function* columns(
  mode: Mode,
  steps: readonly Step[],
  bar: number,
  chosen: number,
): Generator<{ index: number; x: number; span: number }> {
  if (bar >= 1) {
    for (let index = 0; index < steps.length; index++) yield { index, x: index * bar, span: bar };
    return;
  }
  let pixel = 0;
  let best = 0;
  for (let index = 0; index <= steps.length; index++) {
    const at = Math.floor(index * bar);
    if (at > pixel || index === steps.length) {
      yield { index: best, x: pixel, span: 1 };
      pixel = at;
      best = index;
    }
    const [now, then] = [steps[index], steps[best]];
    const longer = now !== undefined && (then === undefined || heightOf(mode, now) > heightOf(mode, then));
    if (best !== chosen && (longer || index === chosen)) best = index;
  }
}

function pattern(context: CanvasRenderingContext2D, colour: string): CanvasPattern | null {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 4;
  const pen = tile.getContext("2d");
  if (pen === null) return null;
  pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  pen.beginPath();
  for (const x of [-4, 0, 4]) {
    pen.moveTo(x, 4);
    pen.lineTo(x + 4, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
