// The whole context in one strip: the pages that the run holds, how far its tokens fill them, and a frame around what the
// stage shows. Dragging the frame moves the stage along the text.

import { effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { count, numbered, plural } from "../ui/format";
import * as stage from "./stage";
import { card, frame, length, run } from "../visit/store";
import { theme } from "../visit/theme";

const STRIP = 20; // px of height at most; the canvas around it is as high as a finger needs
const WHOLE = 4096; // tokens of a context that is shown to its end; of a longer one the beginning is

/** Tokens that the strip stands for. */
function extent(): number {
  const context = card.value?.context ?? 0;
  let shown = WHOLE;
  while (shown < 2 * length.value) shown *= 2;
  return Math.max(1, Math.min(context, shown));
}

function pagesHeld(): number {
  const model = card.value;
  const step = frame.value;
  if (model === null || step === null) return 0;
  if (model.state_bytes > 0)
    return step.kv_allocated > 0n ? Math.ceil((step.start + step.length) / model.page_size) : 0;
  return Math.ceil(Number(step.kv_allocated) / Math.max(1, model.page_size * model.kv_bytes_per_token));
}

/** How many of the text's tokens the cache has after the shown step: the newest one is computed in the next. */
function kept(): string {
  const step = frame.value;
  const tokens = step !== null && step.kv_resident > 0n ? step.start + step.length : 0;
  if (tokens === 0) return "none in the cache";
  return `${count(tokens)} in the cache (${plural(pagesHeld(), "page")})`;
}

export function Minimap() {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => (canvas.current ? watch(canvas.current) : undefined), []);
  const { first, last } = stage.windowed.value;
  const model = card.value;
  const text = length.value;
  const part = last >= first && (first > 0 || last < text - 1);
  const view = part ? `tokens ${numbered(first)} to ${numbered(last)} in view` : "all in view";
  const size = extent();
  const more = model !== null && size < model.context ? ` of ${count(model.context)}` : "";
  return (
    <div class="minimap" data-part-shown={part} title="The whole context. Drag to move along the text">
      <span class="minimap-name">
        {model ? `context: ${plural(text, "token")}, ${kept()}${part ? `; ${view}` : ""}` : ""}
      </span>
      <canvas ref={canvas} role="img" aria-label={`The context, ${count(size)}${more} tokens. Of the text, ${view}.`} />
      <span class="minimap-end">
        {model ? count(size) : ""}
        {more}
      </span>
    </div>
  );
}

function watch(canvas: HTMLCanvasElement): () => void {
  const sizes = new ResizeObserver(() => draw(canvas));
  sizes.observe(canvas);
  const stop = effect(() => {
    void [run.value, frame.value, length.value, card.value, stage.windowed.value, theme.value];
    draw(canvas);
  });
  const move = (event: PointerEvent) => {
    const box = canvas.getBoundingClientRect();
    const position = Math.round(((event.clientX - box.left) / box.width) * extent());
    stage.showPosition(Math.max(0, Math.min(length.peek() - 1, position)));
  };
  canvas.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    canvas.setPointerCapture(event.pointerId);
    move(event);
  });
  canvas.addEventListener("pointermove", (event) => canvas.hasPointerCapture(event.pointerId) && move(event));
  return () => {
    sizes.disconnect();
    stop();
  };
}

function draw(canvas: HTMLCanvasElement): void {
  const { clientWidth: width, clientHeight: room } = canvas;
  const height = Math.min(room, STRIP);
  const context = canvas.getContext("2d");
  if (context === null || width === 0) return;
  const ratio = Math.min(devicePixelRatio, 2);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(room * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, ((room - height) / 2) * ratio);
  const style = getComputedStyle(canvas);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const scale = width / extent();
  const box = (from: number, to: number, y: number, high: number, name: string) => {
    context.fillStyle = colour(name);
    context.fillRect(from * scale, y, Math.max(1, (to - from) * scale), high);
  };
  const size = card.peek()?.page_size ?? 16;
  const step = frame.peek();
  const held = pagesHeld();
  const prompt = Math.min(run.peek()?.promptTokens ?? 0, length.peek());
  box(0, extent(), 0, height, "--empty");
  const kept = step !== null && step.kv_resident > 0n;
  box(0, held * size, 0, height, "--line");
  if (step !== null) box(0, step.start + step.length, 6, height - 6, kept ? "--kept" : "--recomputed");
  box(0, prompt, 2, 3, "--prompt");
  box(prompt, length.peek(), 2, 3, "--generated");
  if (size * scale >= 4) {
    context.fillStyle = colour("--bg");
    for (let page = 1; page * size < extent(); page++) context.fillRect(page * size * scale - 0.5, 0, 1, height);
  }
  const { first, last } = stage.windowed.peek();
  if (last < first) return;
  context.strokeStyle = colour("--ink");
  context.lineWidth = 1.5;
  context.strokeRect(first * scale + 0.75, 0.75, Math.max(3, (last + 1 - first) * scale - 1.5), height - 1.5);
}
