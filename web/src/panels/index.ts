// The panels: what can be opened in the rail's place, beside the live stage. Each is a module of its own in this folder,
// loaded when it is first opened; a line here is all that another one needs.

import type { ComponentType } from "preact";

export interface Panel {
  id: string; // in links: #panel=id
  name: string; // on its button
  title: string; // what it is for, in a sentence
  load: () => Promise<{ default: ComponentType }>;
}

export const PANELS: readonly Panel[] = [
  { id: "race", name: "Race", title: "The same text with the KV cache and without it", load: () => import("./race") },
  { id: "branches", name: "Branches", title: "Go back and go on otherwise", load: () => import("./branches") },
  { id: "sampler", name: "Sampler", title: "Other settings on the same logits", load: () => import("./sampler") },
];
