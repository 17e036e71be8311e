// The part of the page's state that a link carries, in the address after #. Only what differs from the defaults is
// written, so a plain address stays plain. A long prompt belongs into a trace file, not into a link.

import { PANELS } from "../panels";
import { CAMERAS, type Camera } from "../stage/renderers/renderer";

/** Settings of the sampler that the form has no dials for. */
export interface SamplerLink {
  top_k?: number;
  top_p?: number;
  min_p?: number;
  repetition_penalty?: number;
}

const SAMPLER = [
  ["k", "top_k", 1e9],
  ["tp", "top_p", 1],
  ["mp", "min_p", 1],
  ["rp", "repetition_penalty", 10],
] as const;

export interface Link {
  prompt?: string;
  seed?: number;
  temperature?: number;
  sampler?: SamplerLink;
  layer?: number;
  head?: number;
  step?: number;
  tokens?: number; // at most to be written
  stop?: string; // a text at which the run ends
  pace?: number | null; // tokens per second; null: engine speed
  cache?: boolean;
  camera?: Camera;
  renderer?: "2d" | "3d";
  panel?: string;
  inside?: string; // an answer of the chat page, which this browser keeps: conversation.turn
  run?: string; // the id of a run that the server has
  room?: "teach" | "join"; // of a class, in the guide
  embed?: boolean; // the stage without what is around it
}

const LONGEST = 1500; // bytes of a prompt in a link

/** Whether a prompt, or a stop text, is short enough for a link. */
export const fits = (prompt: string): boolean => new TextEncoder().encode(prompt).length <= LONGEST;

export function parse(hash: string): Link {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  const link: Link = {};
  const prompt = values.get("p");
  if (prompt !== null) link.prompt = prompt;
  for (const [key, name] of [
    ["seed", "seed"],
    ["layer", "layer"],
    ["head", "head"],
    ["step", "step"],
    ["n", "tokens"],
  ] as const) {
    const value = whole(values.get(key));
    if (value !== null) link[name] = value;
  }
  const temperature = Number(values.get("T") ?? NaN);
  if (temperature >= 0 && temperature <= 10) link.temperature = temperature;
  for (const [key, name, most] of SAMPLER) {
    const value = name === "top_k" ? whole(values.get(key)) : Number(values.get(key) || NaN);
    const least = name === "top_p" || name === "repetition_penalty" ? Number.MIN_VALUE : 0;
    if (value !== null && value >= least && value <= most) link.sampler = { ...link.sampler, [name]: value };
  }
  const stop = values.get("stop");
  if (stop) link.stop = stop;
  const pace = values.get("pace");
  if (pace === "engine") link.pace = null;
  else if (Number(pace) >= 0.25 && Number(pace) <= 60) link.pace = Number(pace);
  const cache = values.get("cache");
  if (cache === "off" || cache === "on") link.cache = cache === "on";
  const camera = CAMERAS.find((name) => name === values.get("cam"));
  if (camera !== undefined) link.camera = camera;
  const renderer = values.get("renderer") ?? values.get("face"); // older links say "face"
  if (renderer === "2d" || renderer === "3d") link.renderer = renderer;
  const panel = values.get("panel");
  if (panel !== null && PANELS.some(({ id }) => id === panel)) link.panel = panel;
  const inside = values.get("inside");
  if (inside !== null && /^\w{1,64}\.\d{1,9}$/.test(inside)) link.inside = inside;
  const run = values.get("run");
  if (run !== null && /^\w{1,64}$/.test(run)) link.run = run;
  if (values.has("room"))
    Object.assign(link, { room: values.get("room") === "teach" ? "teach" : "join", panel: "guide" });
  if (values.get("embed") === "1") link.embed = true;
  return link;
}

export function format(link: Link): string {
  const values = new URLSearchParams();
  if (link.prompt !== undefined && fits(link.prompt)) values.set("p", link.prompt);
  if (link.seed !== undefined) values.set("seed", String(link.seed));
  if (link.temperature !== undefined) values.set("T", String(link.temperature));
  for (const [key, name] of SAMPLER) {
    const value = link.sampler?.[name];
    if (value !== undefined) values.set(key, String(value));
  }
  if (link.tokens !== undefined) values.set("n", String(link.tokens));
  if (link.stop !== undefined && fits(link.stop)) values.set("stop", link.stop);
  if (link.pace !== undefined) values.set("pace", link.pace === null ? "engine" : String(link.pace));
  if (link.cache !== undefined) values.set("cache", link.cache ? "on" : "off");
  if (link.layer !== undefined) values.set("layer", String(link.layer));
  if (link.head !== undefined) values.set("head", String(link.head));
  if (link.step !== undefined) values.set("step", String(link.step));
  if (link.camera !== undefined) values.set("cam", link.camera);
  if (link.renderer !== undefined) values.set("renderer", link.renderer);
  if (link.panel !== undefined) values.set("panel", link.panel);
  if (link.inside !== undefined) values.set("inside", link.inside);
  if (link.run !== undefined) values.set("run", link.run);
  if (link.room !== undefined) values.set("room", link.room);
  if (link.embed) values.set("embed", "1");
  const text = values.toString();
  return text === "" ? "" : `#${text}`;
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}
