// What the write head read: the arcs of attention, the head itself, and what is said about them in words.

import { beamOpacity, beamWidth, percent } from "../beams";
import { SANS, labelOf, shorten } from "../labels";
import { clamp, easeOut } from "../motion";
import { type Rgb, css, mix } from "../theme";
import type { Picture } from "./picture";

export function paintBeams(p: Picture): void {
  const { c, palette, frame, phases, beams, width } = p;
  if (phases.beams <= 0) return;
  const hub = p.hub;
  const area = width - frame.x0;
  const band = Math.max(8, hub.y - frame.arcTop - 6);
  c.lineCap = "round";
  for (const { position, weight } of beams.drawn) {
    const x = p.centre(position);
    const y = frame.tileTop - 2;
    const far = Math.abs(hub.x - x);
    const apex = Math.min(band, 12 + (band - 12) * (1 - Math.exp((-2.2 * far) / area)) * 1.12);
    const top = (hub.y + y) / 2 - apex * 1.33;
    const lean = Math.min(far, area) * 0.1;
    c.beginPath();
    partOfCurve(c, hub.x, hub.y, hub.x - lean, top, x + lean, top, x, y, phases.beams);
    const strong = Math.sqrt(weight);
    const colour = palette.dark
      ? mix(palette.beam, [1, 1, 1], 0.3 * strong)
      : mix(palette.beam, palette.ink, 0.25 * strong);
    if (palette.dark && weight > 0.1) {
      c.strokeStyle = css(palette.beam, 0.16);
      c.lineWidth = beamWidth(weight) * 2.6;
      c.stroke();
    }
    c.strokeStyle = css(colour, beamOpacity(weight));
    c.lineWidth = beamWidth(weight);
    c.stroke();
  }
}

/** The write head: a carriage that rides over the row, with a bar that strikes the newest token. */
export function paintHead(p: Picture): void {
  const { c, palette, view, frame, phases, snap } = p;
  const hub = p.hub;
  const lift = (1 - easeOut(phases.strike)) * 5;
  const half = clamp(view.pitch * 0.36, 6, 12);
  c.fillStyle = css(palette.accent);
  c.beginPath();
  c.roundRect(hub.x - half, hub.y - 5, half * 2, 10, 3);
  c.fill();
  c.beginPath();
  c.moveTo(hub.x - half * 0.5, hub.y + 5);
  c.lineTo(hub.x + half * 0.5, hub.y + 5);
  c.lineTo(hub.x, frame.tileTop - 3 - lift);
  c.closePath();
  c.fill();
  const wide = p.wide / 2 + 3;
  const x0 = snap(hub.x - wide);
  const x1 = snap(hub.x + wide);
  const y0 = frame.tileTop - 3;
  const y1 = frame.tileTop + frame.tile + 3;
  const arm = Math.min(6, wide * 0.6);
  c.strokeStyle = css(palette.accent);
  c.lineWidth = 1.5;
  c.beginPath();
  for (const [x, way] of [
    [x0, 1],
    [x1, -1],
  ] as const) {
    c.moveTo(x, y1 - arm);
    c.lineTo(x, y1);
    c.lineTo(x + way * arm, y1);
    c.moveTo(x, y0 + arm);
    c.lineTo(x, y0);
  }
  c.stroke();
}

/** What is said in words: the strongest weight where it lands, what is not drawn, and the hovered token in full. */
export function paintNotes(p: Picture): void {
  const { c, palette, scene, frame, phases, beams, width, measure } = p;
  const hub = p.hub;
  c.textBaseline = "middle";
  if (scene.row && phases.beams > 0) {
    c.globalAlpha = phases.beams;
    const x = hub.x + 18;
    if (x < width - 70) {
      c.textAlign = "left";
      c.font = `600 11px ${SANS}`;
      c.fillStyle = css(palette.dim);
      c.fillText(`L${scene.row.layer} H${scene.row.head}`, x, hub.y - 8);
      if (beams.rest >= 0.005) {
        c.font = `11px ${SANS}`;
        c.fillText(`+ ${percent(beams.rest)} on ${beams.restCount} more`, x, hub.y + 7, width - x - 6);
      }
    }
    if (beams.argmax !== null && phases.beams >= 1) {
      const at = p.centre(beams.argmax);
      c.font = `600 11px ${SANS}`;
      const label = labelOf(scene.tokens[beams.argmax]);
      const inside = at > 8;
      const text = inside
        ? percent(beams.strongest)
        : `◂ ${percent(beams.strongest)} on ${beams.argmax} ${shorten(label, 90, measure)}`;
      const w = measure(text) + 8;
      const x0 = inside ? Math.max(4, at - w - 7) : 4;
      plate(p, text, x0, frame.tileTop - 16, w, palette.dark ? palette.beam : palette.ink);
    }
    c.globalAlpha = 1;
  }
  if (scene.hovered !== null && scene.hovered < scene.tokens.length) {
    c.font = `600 12.5px ${SANS}`;
    const text = shorten(labelOf(scene.tokens[scene.hovered]), width - 40, measure);
    const note = `${text}  ·  ${scene.hovered}`;
    const w = measure(note) + 14;
    const x0 = clamp(p.centre(scene.hovered) - w / 2, 4, Math.max(4, width - w - 4));
    plate(p, note, x0, frame.labelTop + 16, w, palette.ink, 20);
  }
}

function plate(p: Picture, text: string, x: number, y: number, w: number, ink: Rgb, h = 16): void {
  const { c, palette } = p;
  c.fillStyle = css(palette.panel, 0.94);
  c.beginPath();
  c.roundRect(x, y - h / 2, w, h, 3);
  c.fill();
  c.strokeStyle = css(palette.line);
  c.lineWidth = 1;
  c.stroke();
  c.fillStyle = css(ink);
  c.textAlign = "center";
  c.fillText(text, x + w / 2, y + 0.5);
}

/** The first `share` of a cubic curve, by de Casteljau's construction. */
function partOfCurve(
  c: CanvasRenderingContext2D,
  x0: number,
  y0: number,
  x1: number,
  y1: number,
  x2: number,
  y2: number,
  x3: number,
  y3: number,
  share: number,
): void {
  const at = (a: number, b: number) => a + (b - a) * share;
  const [ax, ay, bx, by, dx, dy] = [at(x0, x1), at(y0, y1), at(x1, x2), at(y1, y2), at(x2, x3), at(y2, y3)];
  const [ex, ey, fx, fy] = [at(ax, bx), at(ay, by), at(bx, dx), at(by, dy)];
  c.moveTo(x0, y0);
  c.bezierCurveTo(ax, ay, ex, ey, at(ex, fx), at(ey, fy));
}
