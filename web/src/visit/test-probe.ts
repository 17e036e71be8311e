// For tests to look at: attributes of the document and one global, window.__explorer. Nothing in the page reads them.

import { effect } from "@preact/signals";
import { pending } from "./clock";
import type { Placed } from "../stage/renderers/layout";
import type { RendererStats } from "../stage/renderers/renderer";
import { delayAcks } from "./live";
import { ask } from "./server";
import { coming, row, selected } from "../run/answers/attention-row";
import { missed } from "../language/language";
import * as stage from "../stage/stage";
import { cache, camera, frame, last, link, pace, pageState, playing, renderer, run } from "./store";

interface Explorer {
  readonly state: object;
  readonly renderer: RendererStats | null;
  readonly camera: { name: string; orthographic: boolean };
  readonly frames: number;
  readonly pending: boolean; // another picture will come
  readonly row: { layer: number; head: number; argmax: number; codes: number[] } | null;
  readonly words: readonly Placed[]; // of the stage, with their corners
  readonly wall: { left: number; top: number; right: number; bottom: number } | null; // of the cache, on the canvas
  readonly drawTime: number; // ms of this program in the last picture
  readonly untranslated: readonly string[]; // texts without a translation, where the page is not in English
  readonly window: { first: number; last: number }; // positions in view
  project(position: number): { x: number; y: number } | null;
  ask(path: string, init?: RequestInit): Promise<Response>; // of the server, or of the engine in the page
  renderOnce(): void;
  delayAcks(ms: number | null): void;
}

declare global {
  interface Window {
    __explorer?: Explorer;
  }
}

export function install(): void {
  const { dataset } = document.documentElement;
  effect(() => void (dataset.state = pageState.value));
  effect(() => void (dataset.renderer = renderer.value ?? ""));
  effect(() => void (dataset.shown = String(frame.value?.step ?? -1)));
  window.__explorer = {
    get state() {
      return {
        state: pageState.value,
        run: run.value?.id.value ?? null,
        origin: run.value?.origin ?? null,
        engine: run.value?.state.value ?? null,
        ids: run.value?.tokens.map((token) => token.id) ?? [],
        step: frame.value?.step ?? -1,
        steps: last.value + 1,
        playing: playing.value,
        pace: pace.value,
        cache: cache.value,
        link: link.value,
        ...selected.value,
      };
    },
    get renderer() {
      return stage.stats();
    },
    get camera() {
      return { name: camera.value.name, orthographic: stage.orthographic() };
    },
    get frames() {
      return stage.frames();
    },
    get pending() {
      return pending() || coming.value;
    },
    get row() {
      return row.value && { ...row.value, codes: [...row.value.codes] };
    },
    get words() {
      return stage.words();
    },
    get wall() {
      return stage.wall();
    },
    get drawTime() {
      return stage.drawTime();
    },
    get untranslated() {
      return [...missed];
    },
    get window() {
      return stage.windowed.value;
    },
    project: stage.project,
    ask,
    renderOnce: stage.renderOnce,
    delayAcks,
  };
}
