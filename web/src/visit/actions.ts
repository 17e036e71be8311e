// The actions of a visitor, one function each: the buttons, the keys and the test probe all call these.

import * as live from "./live";
import * as player from "../run/play/player";
import * as session from "./session";
import { select } from "../run/answers/attention-row";
import {
  cache,
  camera,
  card,
  clustered,
  frame,
  head,
  last,
  layer,
  panel,
  playing,
  problem,
  renderer,
  rendererChoice,
  rendererNote,
  run,
  shown,
  switched,
} from "./store";
import { type Camera, camerasOf } from "../stage/renderers/renderer";

/** Play or pause; on a finished run: run again, or for a replay from the beginning. */
export function toggle(): void {
  dismiss();
  const current = run.value;
  if (playing.value) return player.pause();
  if (current === null) return void session.start();
  if (shown.value >= last.value && current.origin !== "live") player.seek(-1);
  else if (shown.value >= last.value && current.ended) return void session.start();
  player.play();
  wake();
}

export function step(by: number): void {
  dismiss();
  const lost = session.isLost() && by > 0 && shown.value >= last.value;
  if (!lost) return player.step(by);
  player.stepLater(by);
  void session.revive();
}

/** A run whose pages are gone is built again when it is to go on. */
function wake(): void {
  if (session.isLost() && playing.value) void session.revive();
}

export const first = (): void => player.seek(0);
export const end = (): void => player.seek(last.value);

/** For the next step of a live run; of a file that has both ways, for the shown one. */
export function setCache(on: boolean): void {
  if (run.value !== null && run.value.origin !== "live") {
    switched.value = true;
    return player.showWay(on);
  }
  if (clustered.value) return;
  switched.value = true;
  cache.value = on;
  live.send({ op: "cache", on });
}

export function toggleCache(): void {
  const replayed = run.value === null || run.value.origin === "live" ? null : frame.value;
  setCache(!(replayed?.cache ?? cache.value));
}

export function changeLayer(by: number): void {
  const layers = card.value?.layers ?? 1;
  select((layer.value + by + layers) % layers, head.value);
}

export function changeHead(by: number): void {
  const heads = card.value?.heads ?? 1;
  select(layer.value, (head.value + by + heads) % heads);
}

/** Asked for a second time, a camera goes back to its place: hence a new object each time. */
export function setCamera(name: Camera): void {
  if (camerasOf(renderer.value).includes(name)) camera.value = { name };
}

export function setRenderer(kind: "2d" | "3d"): void {
  rendererNote.value = "";
  rendererChoice.value = kind;
}

export function toggleRenderer(): void {
  setRenderer(renderer.value === "3d" ? "2d" : "3d");
}

/** Opens a panel in the drawer, or closes the drawer where it is open with it. */
export function openPanel(id: string): void {
  panel.value = panel.value === id ? null : id;
}

export function chooseTrace(): void {
  const input = document.createElement("input");
  input.type = "file";
  input.accept = ".json,application/json";
  input.onchange = () => {
    const file = input.files?.[0];
    if (file) void session.openTrace(file);
  };
  input.click();
}

export function dismiss(): void {
  problem.value = null;
}
