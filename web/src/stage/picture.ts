// The stage as a picture: what is on the canvas, a line above it that says what it is, and below it the legend and the
// figures of the shown step, with the badges that they have on the page.

import { translated } from "../language/language";
import { numbered, shown } from "../ui/format";
import { NUMBERS, type StepFrame } from "../schema";
import * as stage from "./stage";
import { card, frame, length, run } from "../visit/store";
import { work } from "../visit/messages";

export const ABOVE = 40; // CSS px over the stage
export const BELOW = 96; // and under it
const MARGIN = 16;

const FIGURES: readonly (keyof StepFrame)[] = ["layer_tokens", "flops", "step_us", "kv_resident", "seq_len"];

/** A PNG, as wide as the stage in device pixels; null where nothing is drawn. */
export async function picture(): Promise<Blob | null> {
  const source = stage.drawn();
  const step = frame.value;
  if (source === null || source.width < 2 || step === null) return null;
  const ratio = source.width / source.clientWidth;
  const canvas = document.createElement("canvas");
  canvas.width = source.width;
  canvas.height = source.height + Math.round((ABOVE + BELOW) * ratio);
  const c = canvas.getContext("2d");
  if (c === null) return null;
  const paper = new Paper(c, source.clientWidth);
  c.fillStyle = paper.colour("--panel");
  c.fillRect(0, 0, canvas.width, canvas.height);
  c.drawImage(source, 0, Math.round(ABOVE * ratio)); // in the same turn as it was drawn: a WebGL canvas forgets it later
  await new Promise((resolve) => setTimeout(resolve)); // until the page's legend is that of the picture
  c.scale(ratio, ratio);
  paper.line(title(step), ABOVE / 2);
  const foot = ABOVE + source.clientHeight;
  legend(paper, foot + 20);
  paper.line(sentence(step), foot + 48);
  figures(paper, step, foot + 74);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function title(step: StepFrame): string {
  const prompt = (run.value?.card.prompt ?? "").replace(/\s+/g, " ");
  return translated(
    `Tokenwright  ·  ${card.value?.name ?? ""}  ·  step ${numbered(step.step)}, ${length.value} tokens  ·  ${prompt}`,
  );
}

function sentence(step: StepFrame): string {
  return `${translated(step.cache ? "With the KV cache" : "Without the cache")}: ${translated(work(step))}.`;
}

class Paper {
  private readonly style = getComputedStyle(document.documentElement);

  constructor(
    readonly c: CanvasRenderingContext2D,
    readonly width: number,
  ) {
    c.textBaseline = "middle";
  }

  colour(name: string): string {
    return this.style.getPropertyValue(name).trim();
  }

  /** A line of text, cut where the picture ends. */
  line(text: string, y: number): void {
    this.write(this.cut(text, this.width - 2 * MARGIN, 13), MARGIN, y, "--ink", 13);
  }

  /** Returns where the text ends. */
  write(text: string, x: number, y: number, colour: string, size: number): number {
    this.font(size);
    this.c.fillStyle = this.colour(colour);
    this.c.fillText(text, x, y);
    return x + this.c.measureText(text).width;
  }

  private cut(text: string, room: number, size: number): string {
    this.font(size);
    if (this.c.measureText(text).width <= room) return text;
    const glyphs = [...text].slice(0, 400);
    while (glyphs.length > 0 && this.c.measureText(`${glyphs.join("")}…`).width > room) glyphs.pop();
    return `${glyphs.join("")}…`;
  }

  private font(size: number): void {
    this.c.font = `${size}px ${this.colour("--sans") || "sans-serif"}`;
  }
}

/** The legend that stands under the stage: each entry with its own swatch. */
function legend(paper: Paper, y: number): void {
  let x = MARGIN;
  for (const entry of document.querySelectorAll(".legend li:not(.later)")) {
    const swatch = entry.querySelector(".swatch");
    if (swatch === null) continue;
    sample(paper.c, getComputedStyle(swatch), x, y);
    x = paper.write(entry.textContent ?? "", x + 18, y, "--soft", 12) + 18;
  }
}

/** A swatch as the style sheet draws it: filled, outlined, or hatched. */
function sample(c: CanvasRenderingContext2D, style: CSSStyleDeclaration, x: number, y: number): void {
  const [width, height] = [Number.parseFloat(style.width), Number.parseFloat(style.height)];
  const border = Number.parseFloat(style.borderTopWidth);
  c.fillStyle = style.backgroundColor;
  c.fillRect(x, y - height / 2, width, height);
  if (border > 0) {
    c.strokeStyle = style.borderTopColor;
    c.lineWidth = border;
    if (style.borderBottomWidth === "0px") return arch(c, x, y, width, height - border);
    c.strokeRect(x + border / 2, y - height / 2 + border / 2, width - border, height - border);
  }
  if (style.backgroundImage === "none") return;
  c.lineWidth = 1.5;
  for (let at = 2; at < width + height; at += 4) {
    c.beginPath();
    c.moveTo(x + Math.max(0, at - height), y - height / 2 + Math.min(at, height));
    c.lineTo(x + Math.min(at, width), y - height / 2 + Math.max(0, at - width));
    c.stroke();
  }
}

function arch(c: CanvasRenderingContext2D, x: number, y: number, width: number, height: number): void {
  c.beginPath();
  c.ellipse(x + width / 2, y + height / 2, width / 2, height, 0, Math.PI, 2 * Math.PI);
  c.stroke();
}

function figures(paper: Paper, step: StepFrame, y: number): void {
  let x = MARGIN;
  for (const name of FIGURES) {
    const about = NUMBERS[name];
    if (about === undefined) continue;
    const [value, unit] = shown(step[name] as number | bigint | null, about.unit);
    const end = paper.write(`${translated(about.label)} `, x, y, "--dim", 12);
    const after = paper.write(`${value}${unit === "" ? "" : ` ${unit}`} `, end, y, "--ink", 13);
    x = paper.write(about.source[0]?.toUpperCase() ?? "", after, y, "--dim", 9) + 20;
  }
}
