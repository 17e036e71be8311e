// The scrubber: one bar per step, as high as the step took, stacked by what the time went into. Steps that computed
// something again stand on a hatched vermillion foot. Many steps share a pixel: then the longest of them is drawn.

import { computed, effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { joined, micros } from "../format";
import * as player from "../player";
import { frame, last, run, shown } from "../store";
import { theme } from "../theme";
import type { StepFrame } from "../schema";

export const PARTS = [
  ["attention", "attention"],
  ["mlp", "MLP"],
  ["head", "LM head"],
  ["sampling", "sampling"],
  ["overhead", "rest"],
] as const;

type Part = (typeof PARTS)[number][0];

/** What a step's time went into, in µs. The rest is what no other part accounts for. */
export function shares(step: StepFrame): Record<Part, number> {
  const { attention_us: attention, mlp_us: mlp, head_us: head, sampling_us: sampling } = step;
  return { attention, mlp, head, sampling, overhead: Math.max(0, step.step_us - attention - mlp - head - sampling) };
}

const FOOT = 5; // px, below the bars: the mark of recomputing
const WIDEST = 26; // px of one bar
const HEADROOM = 1.12;

const top = computed(() => (void last.value, ceiling(run.value?.frames ?? [])));

export function Scrubber() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const step = frame.value;
  useEffect(() => (canvas.current ? watch(canvas.current) : undefined), []);
  const text = step ? `step ${step.step}, ${joined(micros(step.step_us))}` : "no step yet";
  return (
    <div class="scrubber">
      <canvas
        ref={canvas}
        role="slider"
        tabIndex={0}
        aria-label="Step"
        aria-valuemin={0}
        aria-valuemax={Math.max(0, last.value)}
        aria-valuenow={Math.max(0, shown.value)}
        aria-valuetext={text}
      />
      <ul class="parts" aria-label="Time of the shown step">
        {PARTS.map(([part, name]) => (
          <li key={part}>
            <span class={`swatch time-${part}`} aria-hidden="true" />
            {name}
            <span class="part-time">{step ? joined(micros(shares(step)[part])) : ""}</span>
          </li>
        ))}
        {step && <li class="scale">full height {joined(micros(top.value))}</li>}
      </ul>
    </div>
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

function watch(canvas: HTMLCanvasElement): () => void {
  const sizes = new ResizeObserver(() => draw(canvas));
  sizes.observe(canvas);
  const stop = effect(() => {
    void [run.value, last.value, shown.value, theme.value];
    draw(canvas);
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

function draw(canvas: HTMLCanvasElement): void {
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
  const steps = run.peek()?.frames ?? [];
  const style = getComputedStyle(canvas);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const floor = height - FOOT - 1;
  context.fillStyle = colour("--line");
  context.fillRect(0, floor, width, 1);
  if (steps.length === 0) return;

  const bar = plan(steps.length, width).width;
  const most = top.peek();
  const gap = bar >= 4 ? 1 : 0;
  const colours = new Map(PARTS.map(([part]) => [part, colour(`--time-${part}`)]));
  const hatch = pattern(context, colour("--recomputed"));
  for (const { index, x, span } of columns(steps, bar)) {
    const step = steps[index];
    if (!step) continue;
    if (index === shown.peek()) {
      context.fillStyle = colour("--raised");
      context.fillRect(x, 0, Math.max(2, span), height);
    }
    let y = floor;
    const clipped = step.step_us > most;
    const scale = (floor - 2) / (clipped ? step.step_us : most);
    const times = shares(step);
    context.globalAlpha = index <= shown.peek() ? 1 : 0.35;
    for (const [part] of PARTS) {
      const size = times[part] * scale;
      context.fillStyle = colours.get(part) ?? "";
      context.fillRect(x, y - size, Math.max(0.5, span - gap), size);
      y -= size;
    }
    if (clipped) {
      context.clearRect(x, 6, span, 2); // a break: higher than the scale
    }
    if (step.recomputed > 0) {
      context.fillStyle = hatch ?? colour("--recomputed");
      context.fillRect(x, floor + 1, span, FOOT);
    }
    context.globalAlpha = 1;
    if (index === shown.peek()) {
      context.fillStyle = colour("--accent");
      context.fillRect(x, height - 2, Math.max(3, span - gap), 2);
    }
  }
}

/** The top of the scale. Reading the prompt is one long step: it may stick out, or others would vanish beside it. */
function ceiling(steps: readonly StepFrame[]): number {
  let most = 0;
  for (const step of steps) if (step.start > 0 || step.recomputed > 0) most = Math.max(most, step.step_us);
  const all = steps.reduce((high, step) => Math.max(high, step.step_us), 1);
  return most > 0 ? Math.min(all, most) * HEADROOM : all;
}

/** Where each bar stands; where steps share a pixel, that of the longest one, or of the shown one. */
function* columns(steps: readonly StepFrame[], bar: number): Generator<{ index: number; x: number; span: number }> {
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
    const longer = (steps[index]?.step_us ?? 0) > (steps[best]?.step_us ?? 0);
    if (best !== shown.peek() && (longer || index === shown.peek())) best = index;
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
