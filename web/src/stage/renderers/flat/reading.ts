// The tokens that the write head read: the arcs of attention, the head itself, and what is said about them in words.

import { translated } from "../../../language/language";
import { percent } from "../../../ui/format";
import { beamOpacity, beamWidth, dropWidth, drops, readerOf } from "../beams";
import { hoveredName, readingNames, strongestNames } from "../labels";
import { clamp, easeOut } from "../motion";
import { css, mix } from "../theme";
import type { Picture } from "./picture";
import { fontOf } from "./tokens";

const BEHIND_WORDS = 0.3; // opacity of a beam where it crosses the words of the tokens

export function paintBeams(p: Picture): void {
  const { c, palette, frame, phases, beams, width } = p;
  if (phases.beams <= 0) return;
  if (p.scene.row === null) return;
  const from = { x: p.centre(readerOf(p.scene.row, p.scene.head)), y: frame.tileTop - 2 }; // whose query it is
  const area = width - frame.x0;
  const band = Math.max(8, from.y - frame.arcTop - 6);
  c.lineCap = "round";
  for (const { position, weight } of beams.drawn) {
    const x = p.centre(position);
    const y = frame.tileTop - 2;
    const far = Math.abs(from.x - x);
    const apex = Math.min(band, 12 + (band - 12) * (1 - Math.exp((-2.2 * far) / area)) * 1.12);
    const top = y - apex * 1.33;
    const lean = Math.min(far, area) * 0.1;
    c.beginPath();
    partOfCurve(c, from.x, from.y, from.x - lean, top, x + lean, top, x, y, phases.beams);
    const strong = Math.sqrt(weight);
    const colour = palette.dark
      ? mix(palette.beam, [1, 1, 1], 0.3 * strong)
      : mix(palette.beam, palette.ink, 0.25 * strong);
    if (palette.dark && weight > 0.1 && p.scene.cache) {
      c.strokeStyle = css(palette.beam, 0.16);
      c.lineWidth = beamWidth(weight) * 2.6;
      c.stroke();
    }
    c.strokeStyle = css(colour, beamOpacity(weight) * (p.scene.cache ? 1 : 0.3));
    c.lineWidth = beamWidth(weight);
    c.stroke();
    if (drops(weight) && frame.cell > 0 && x > frame.x0) {
      const top = frame.labelTop; // and on, down to the token's cell in the layer that is read
      const to = frame.cellsTop + (p.scene.layer + 0.5) * frame.cell;
      c.lineWidth = dropWidth(weight);
      const end = top + (to - top) * phases.beams;
      const under = Math.min(end, frame.cellsTop);
      for (const [y0, y1, alpha] of [
        [top, under, BEHIND_WORDS],
        [under, end, 1],
      ] as const) {
        c.globalAlpha = alpha;
        c.beginPath();
        c.moveTo(x, y0);
        c.lineTo(x, y1);
        c.stroke();
      }
    }
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
  const wide = p.wide(p.scene.head) / 2 + 3;
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

/** What the beams say in words: the strongest weight where it lands, and what is not drawn. */
export function placeNotes(p: Picture): void {
  const { c, palette, scene, frame, phases, beams, width, measure, layout, hub } = p;
  if (!scene.row || phases.beams <= 0) return;
  if (beams.argmax !== null && phases.beams >= 1) {
    const at = p.centre(beams.argmax);
    const inside = at > 8;
    c.font = fontOf(11, true);
    const names = strongestNames(scene, beams.argmax, beams.strongest, inside, measure);
    const x = (text: string): number => {
      const half = measure(text) / 2 + 5;
      return inside ? Math.max(half, Math.min(at, hub.x - 14 - half)) : 8; // over its tile, and left of the head
    };
    const colour = !scene.cache ? palette.dim : palette.dark ? palette.beam : palette.ink;
    const look = scene.cache ? { plate: 0.94 } : { alpha: 0.7 };
    const note = { y: frame.tileTop - 16, size: 11, bold: true, alignX: inside ? 0.5 : 0, colour, ...look };
    names.some((text) => layout.add({ ...note, text, x: x(text) }));
  }
  const note = { x: hub.x + 18, alignX: 0, size: 11, colour: palette.dim, alpha: phases.beams };
  if (note.x > width - 50) return;
  c.font = fontOf(11, true);
  readingNames(scene, scene.row, measure).some((text) => layout.add({ ...note, text, y: hub.y - 8, bold: true }));
  if (beams.rest >= 0.005)
    layout.add({ ...note, text: translated(`+ ${percent(beams.rest)} on ${beams.restCount} more`), y: hub.y + 7 });
}

/** The hovered token in full. */
export function placeHovered(p: Picture): void {
  const { c, palette, scene, frame, width, measure, layout } = p;
  if (scene.hovered === null || scene.hovered >= scene.tokens.length) return;
  c.font = fontOf(12.5, true);
  const text = hoveredName(scene, scene.hovered, width - 80, measure);
  const half = measure(text) / 2 + 8;
  const x = clamp(p.centre(scene.hovered), half, Math.max(half, width - half));
  layout.add({ text, x, y: frame.labelTop + 16, size: 12.5, bold: true, colour: palette.ink, plate: 0.96 });
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
