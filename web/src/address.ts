// The address keeps up with the form and the view, so that it can be copied or reloaded at any time. It is written
// without an entry in the history, and not more often than once in a while.

import { effect } from "@preact/signals";
import { format, parse, type Link } from "./hash";
import * as form from "./form";
import { camera, frame, head, last, layer, live, picked, playing, rendererChoice, run, shown } from "./store";

const PAUSE = 300; // ms

/** Takes over what the address says. Layer and head wait for the model, which says how many there are. */
export function read(): Link {
  const link = parse(location.hash);
  if (link.prompt !== undefined) form.prompt.value = link.prompt;
  if (link.seed !== undefined) form.seed.value = link.seed;
  if (link.temperature !== undefined) form.temperature.value = link.temperature;
  if (link.camera !== undefined) camera.value = { name: link.camera };
  if (link.renderer !== undefined) rendererChoice.value = link.renderer;
  return link;
}

/** What the page shows now, as far as it differs from the defaults. */
function now(): Link {
  const link: Link = {};
  if (form.prompt.value !== form.PROMPTS[0].text) link.prompt = form.prompt.value;
  if (form.seed.value !== null) link.seed = form.seed.value;
  if (form.temperature.value !== null) link.temperature = form.temperature.value;
  if (picked.value) Object.assign(link, { layer: layer.value, head: head.value });
  if (camera.value.name !== "iso") link.camera = camera.value.name;
  if (rendererChoice.value !== null) link.renderer = rendererChoice.value;
  if (live.value && !playing.value && shown.value < last.value && frame.value) link.step = frame.value.step;
  return link;
}

/** A link to exactly this run: with the seed that it drew. */
export function share(): string {
  const link = now();
  const card = live.value ? run.value?.card : null;
  if (card) {
    link.prompt = card.prompt;
    link.temperature = card.temperature;
    if (card.seed !== null) link.seed = card.seed;
  }
  return location.href.replace(/#.*/, "") + format(link);
}

export function keep(): void {
  effect(() => {
    const hash = format(now());
    const timer = setTimeout(() => {
      if (location.hash !== hash)
        history.replaceState(null, "", hash === "" ? location.pathname + location.search : hash);
    }, PAUSE);
    return () => clearTimeout(timer);
  });
}
