// The only loop of the page: one animation frame at a time, asked for when something has changed and again only while
// something moves. In each: take what has arrived, draw, then report what was rendered. A page that is not visible gets
// no animation frames, so a slow timer stands in; a run must not stall because someone looks elsewhere.

import { computed, signal } from "@preact/signals";
import { READS, WRITES } from "../stage/renderers/motion";

const LONGEST = 900; // ms that the animation of a single step may take
const SLOWEST = 2400; // ms that it may take at a low speed: then the layers are seen to fill one after another
const TOLD = 1200; // ms from which an animation is slow enough to be told in parts
const SHARE = 0.6; // of the time until the next step
const SHORTEST = 150; // ms between steps below which nothing is animated

export const parts = {
  take: (): void => undefined,
  draw: (_now: number, _progress: number): boolean => false, // whether it wants another frame
  rendered: (): void => undefined,
};

/** Which part of an animation is on the stage: the layers work, the head reads, the token is written. One that is too
 * short to be told in parts has a "pass", until the token is written, and is then at rest. */
export type Moment = "work" | "look" | "write" | "pass" | "rest";
export const moment = signal<Moment>("rest");
/** Whether the stage shows the token that the shown step wrote. What else shows it waits for this. */
export const written = computed(() => moment.value === "write" || moment.value === "rest");

const reduced = matchMedia("(prefers-reduced-motion: reduce)");

let asked = false;
let request = 0;
let timer: ReturnType<typeof setTimeout> | undefined;
let began = 0;
let duration = 0; // of the step's animation; 0: at rest

/** Whether another picture will come. */
export const pending = (): boolean => asked;

export function invalidate(): void {
  if (asked) return;
  asked = true;
  if (document.hidden) timer = setTimeout(frame, 100);
  else request = requestAnimationFrame(frame);
}

/** Lets a new step appear: over a part of the time until the next one, or at once where that is short. */
export function animate(interval: number, longest = interval === Infinity ? LONGEST : SLOWEST): void {
  const length = Math.min(interval * SHARE, longest);
  duration = interval >= SHORTEST && !reduced.matches && !document.hidden ? length : 0;
  began = performance.now();
  moment.value = momentOf(duration > 0 ? 0 : 1);
  invalidate();
}

/** As `animate`, for what may come faster than it can be shown: an animation that is under way goes on. */
export function pulse(length: number): void {
  if (duration === 0) animate(length / SHARE, length);
  else invalidate();
}

/** The step that is shown is at rest. */
export function settle(): void {
  duration = 0;
  invalidate();
}

function frame(): void {
  cancelAnimationFrame(request);
  clearTimeout(timer);
  parts.take(); // still asked: what this changes is drawn now
  asked = false;
  const now = performance.now();
  const progress = duration > 0 ? Math.min(1, (now - began) / duration) : 1;
  if (progress === 1) duration = 0;
  moment.value = momentOf(progress);
  const more = parts.draw(now, progress);
  if (more || progress < 1) invalidate();
  setTimeout(parts.rendered); // after the components have written the same step into the page
}

/** The same shares of the animation as those of what is drawn. */
function momentOf(progress: number): Moment {
  const told = duration >= TOLD;
  if (progress === 1) return "rest";
  if (progress > WRITES) return told ? "write" : "rest";
  if (!told) return "pass";
  return progress > READS ? "look" : "work";
}

document.addEventListener("visibilitychange", () => {
  if (!asked) return;
  asked = false;
  cancelAnimationFrame(request);
  clearTimeout(timer);
  invalidate();
});
